import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.features.errors import ConfigurationError, RequestError
from isthmus.features.files import is_url, require_delta, require_local
from isthmus.features.offline.delta import storage_files
from tests.end_to_end.test_paths import NAMES, REFUSED

_TABLE = """
import os
import sys
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

rows = pa.table({"x": [1], "day": ["a"]})
for place in sys.argv[1:]:
    print(repr(place), flush=True)
    for _ in range(2):
        write_deltalake(place, rows, partition_by=["day"], mode="append")
    write_deltalake(DeltaTable(place), rows, mode="overwrite", predicate="day = 'a'")
    assert DeltaTable(place).to_pyarrow_table().num_rows == 1
    DeltaTable(place).optimize.compact()
os._exit(0)  # Arrow's threads may abort the process when the interpreter ends.
"""


@pytest.mark.parametrize(
    ("place", "expected"),
    [("s3://b/x", True), ("S3A://b", True), (" gs://b", True), ("/a://b", False), ("data/x", False), ("a:b", False),
     ("SELECT 's3://b'", False), ("package:NAME/x", False)],
)  # fmt: skip
def test_what_is_a_url(place: str, expected: bool) -> None:
    assert is_url(place) == expected


def test_a_url_is_no_local_path() -> None:
    with pytest.raises(RequestError, match="out: s3://bucket/set is a URL; expected a local path"):
        require_local("out", "s3://bucket/set")
    assert require_local("out", "sets/a") == Path("sets/a")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_delta_table_is_refused_where_deltalake_fails(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"table: path: deltalake cannot open .* Rename it"):
        require_delta("table", str(tmp_path / f"a{name}b" / "t"), "rename it")


def test_a_link_to_such_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a[1]").mkdir()
    (tmp_path / "plain").symlink_to("a[1]")
    with pytest.raises(ConfigurationError, match="because it contains '\\['"):
        require_delta("table", str(tmp_path / "plain" / "t"), "rename it")


@pytest.mark.parametrize("url", ["s3://b/c#", "s3://b/c?x", "s3://b/a%20b", "s3://b/[1]"])
def test_a_url_is_refused_that_deltalake_would_cut(url: str) -> None:
    with pytest.raises(ConfigurationError, match="deltalake cannot open"):
        require_delta("stores.offline", url, "rename it")
    # The same for training sets and sources: the files would be those of another place.
    with pytest.raises(ConfigurationError, match="object storage: path: deltalake cannot open"):
        storage_files(url, {})
    assert require_delta("stores.offline", "s3://bucket/shop v2", "rename it") == "s3://bucket/shop v2"


def _tables(folder: Path, *names: str) -> "subprocess.CompletedProcess[str]":
    """Write a table in a folder of each name, in a process of its own: a panic prints to the terminal."""
    places = [folder / f"a{name}b" for name in names]
    for place in places:
        place.mkdir()
    command = [sys.executable, "-c", _TABLE, *(str(place / "t") for place in places)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for place in places:
        shutil.rmtree(place)
    return done


@pytest.mark.accept
def test_deltalake_still_works_with_every_name_that_is_not_refused(tmp_path: Path) -> None:
    done = _tables(tmp_path, *(name for name in NAMES if name not in REFUSED))
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


@pytest.mark.accept
@pytest.mark.parametrize("name", [name for name in NAMES if name in REFUSED])
def test_deltalake_still_fails_at_a_name_that_is_refused(name: str, tmp_path: Path) -> None:
    assert _tables(tmp_path, name).returncode != 0
