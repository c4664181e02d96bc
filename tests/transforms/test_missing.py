"""What an engine could not reach. The texts are those of Apache Spark 4.1."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from isthmus.features.definition.spec import Source
from isthmus.features.errors import DependencyError
from isthmus.transforms import engine, sources
from isthmus.transforms.tables.missing import explain_missing
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views.executorset import JoinedViews, StoredSpine, spine_part, write_parts
from tests.features.support import ALL, make_view
from tests.transforms.connect import connect_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OPEN = "the engine cannot open {file}, though this process can. Mount that folder"
_UNREACHED = {
    "[PATH_NOT_FOUND] Path does not exist: file:{file}. SQLSTATE: 42K03\n\nJVM stacktrace:\n": _OPEN,
    "Job aborted\n[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file file://{file}. "
    "File does not exist. It is possible the underlying files have been updated.": _OPEN,
    "\n  An exception was thrown\nTraceback (most recent call last):\n  File ...\nFileNotFoundError: {file}\n": _OPEN,
    "FileNotFoundError: [Errno 2] No such file or directory: '{file}'\n": _OPEN,
    "PermissionError: [Errno 13] Permission denied: '{file}'\n": _OPEN,
    "FileNotFoundError: [Errno 2] Failed to open local file '{folder}/.v-0.parquet-0af'. Detail: [errno 2]": (
        "the engine cannot open {folder}/.v-0.parquet-0af"
    ),
    '(org.apache.hadoop.fs.UnsupportedFileSystemException) No FileSystem for scheme "s3"\n\nJVM stacktrace:\n': (
        'this Spark does not read such URLs (No FileSystem for scheme "s3"). Start its server with hadoop-aws'
    ),
    '(org.apache.hadoop.fs.UnsupportedFileSystemException) No FileSystem for scheme "abfss"\n\nJVM stacktrace:\n': (
        'this Spark does not read such URLs (No FileSystem for scheme "abfss"). Start its server with Hadoop\'s '
        "connector for abfss://, of the version of its Hadoop, in spark.jars.packages; or set engine"
    ),
    "(java.lang.RuntimeException) java.lang.ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem "
    "not found\n": "this Spark does not read such URLs (Class org.apache.hadoop.fs.s3a.S3AFileSystem not found)",
    "AttributeError: Can't get attribute '_x' on <module 'isthmus.transforms' from '/usr/__init__.py'>\n": (
        "the executors have another version of isthmus (Can't get attribute '_x' on"
    ),
    "\nModuleNotFoundError: No module named 'isthmus'\n": "the executors do not have the Python module isthmus",
}


@pytest.mark.parametrize("said", _UNREACHED)
def test_the_error_says_what_could_not_be_reached_and_what_to_do(said: str, tmp_path: Path) -> None:
    file = tmp_path / "a b.parquet"
    file.touch()
    with pytest.raises(DependencyError) as caught, explain_missing("join"):
        raise PySparkException(said.format(file=file, folder=tmp_path))
    assert str(caught.value).startswith("join: " + _UNREACHED[said].format(file=file, folder=tmp_path))
    assert 'set engine = "sail"' in caught.value.remedy
    assert "again" not in caught.value.remedy


@pytest.mark.parametrize(
    "said",
    ["[PATH_NOT_FOUND] Path does not exist: file:/nowhere/x. SQLSTATE: 42K03",
     "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'\n",
     "ModuleNotFoundError: No module named 'nowhere'", "[DIVIDE_BY_ZERO] Division by zero."],
)  # fmt: skip
def test_what_this_process_lacks_too_stays_as_it_is(said: str) -> None:
    with pytest.raises(PySparkException, match=r"nowhere|ZERO"), explain_missing("join"):
        raise PySparkException(said)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """A session on Apache Spark in a process of its own."""
    with (
        connect_server(tmp_path_factory.mktemp("spark") / "server.log") as url,
        engine.session(url) as spark,
    ):
        yield spark


@pytest.mark.accept
def test_spark_says_so_of_files_that_it_does_not_see(cluster: "SparkSession", tmp_path: Path) -> None:
    # Only this process has the file under this name.
    with (tmp_path / "rows.parquet").open("wb") as file:
        pq.write_table(pa.table({"k": ["a"]}), file)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    seen = Path(f"/proc/self/fd/{descriptor}/rows.parquet")
    try:
        with pytest.raises(DependencyError, match=f"source rows: the engine cannot open {seen}"):
            sources.read(cluster, Source("rows", path=str(seen)), tmp_path, tmp_path / "staging")
        view = make_view(ALL, {"k": ALL["string"]}, None, "v")
        store = Store(str(seen.parent), {})
        spine = StoredSpine(store, pa.schema({"k": pa.string()}), 1, "")
        (tmp_path / spine_part(0)).touch()
        views = JoinedViews([(view, ["rows.parquet"], ["int64"])], status=True)
        with pytest.raises(DependencyError, match="join by the engine: the engine cannot open /proc/self/fd/"):
            write_parts(cluster, spine, views, store)
    finally:
        os.close(descriptor)


@pytest.mark.accept
@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_spark_says_so_of_a_storage_that_it_does_not_know(cluster: "SparkSession", scheme: str, tmp_path: Path) -> None:
    source = Source("rows", path=f"{scheme}://bucket/rows.parquet")
    with pytest.raises(DependencyError, match=r"source rows: this Spark does not read such URLs .* hadoop-aws"):
        sources.read(cluster, source, tmp_path, tmp_path / "staging")
