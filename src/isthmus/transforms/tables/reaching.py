"""Files and packages that an engine's driver or executors do not have, though this machine has them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from isthmus.features.errors import DependencyError

_SAIL = 'set engine = "sail", which runs on this machine'
_FILE = re.compile(
    r"Path does not exist: (?:file:)?(.+?)(?:\. SQLSTATE|$)"
    r"|reading file (?:file:/*)?(/.+?)\. File does not exist"
    r"|(?:FileNotFound|Permission)Error: (?:\[Errno \d+\][^:]*: '?)?(/.+?)'?$"
    r"|Failed to open local file '(?P<new>.+?)'",
    re.MULTILINE,
)
_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_SCHEME = re.compile(r"(No FileSystem for scheme \"(?P<scheme>\w+)\"|Class org\.apache\.hadoop\.fs\.s3a\S+ not found)")


@contextmanager
def reaching(where: str) -> Iterator[None]:
    """Turn an engine's error about a file or a package that it lacks into what to do about it.

    Raises:
        DependencyError: the engine does not reach a file of this machine or a URL, or its executors lack a module.
    """
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        if (unreached := _unreached(where, str(error))) is not None:
            # The error's plan may show what was sent to the executors.
            raise unreached from None
        raise


def _unreached(where: str, said: str) -> DependencyError | None:
    if found := _SCHEME.search(said):
        setting = "" if found["scheme"] is None else (
            f", and set spark.hadoop.fs.{found['scheme']}.impl to org.apache.hadoop.fs.s3a.S3AFileSystem"
        )  # fmt: skip
        return DependencyError(
            where, f"this Spark does not read such URLs ({found[0]})", passes=False,
            remedy=f"start its server with hadoop-aws, of the version of its Hadoop, in spark.jars.packages{setting}; "
            f"or {_SAIL}",
        )  # fmt: skip
    if (found := _MODULE.search(said)) and find_spec(found[1]) is not None:
        return DependencyError(
            where, f"the executors do not have the Python module {found[1]}, though this process does", passes=False,
            remedy=f"install it in the Python that they run, PYSPARK_PYTHON, or add its folder to their PYTHONPATH; "
            f"or {_SAIL}",
        )  # fmt: skip
    found = _FILE.search(said)
    path = Path(next(filter(None, found.groups()))) if found else None
    # A file that is to be written is not there yet.
    if found is None or path is None or not (path.parent if found["new"] else path).exists():
        return None
    return DependencyError(
        where, f"the engine cannot open {path}, though this process can", passes=False,
        remedy="mount that folder, with the same path and the permission to use it, where Spark's driver and its "
        f"executors run; or {_SAIL}",
    )  # fmt: skip
