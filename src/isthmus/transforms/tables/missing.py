"""Errors about files and packages that this machine has, but an engine's driver or executors lack."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from isthmus.features.errors import DependencyError

_FILE = re.compile(
    r"Path does not exist: (?:file:)?(.+?)(?:\. SQLSTATE|$)"
    r"|reading file (?:file:/*)?(/.+?)\. File does not exist"
    r"|(?:FileNotFound|Permission)Error: (?:\[Errno \d+\][^:]*: '?)?(/.+?)'?$"
    r"|Failed to open local file '((?P<folder>.+)/.+?)'",
    re.MULTILINE,
)
"""Error messages about missing files. A file to be written may not exist yet, but its folder does."""
_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_OTHER = re.compile(r"AttributeError: (Can't get attribute '\w+' on <module 'isthmus\b.+>)")
_SCHEME = re.compile(r"(No FileSystem for scheme \"(?P<scheme>\w+)\"|Class org\.apache\.hadoop\.fs\.s3a\S+ not found)")

_EXECUTOR = re.compile(r"isthmus\.features\.errors\.DependencyError: (\S+ on executor \S+: .+)")


@contextmanager
def explain_missing(where: str) -> Iterator[None]:
    """Explain errors of the engine in the block: its machines lack a file, a Python module or S3 support.

    Raises a DependencyError with a remedy in place of such an error. An error about a file or module that this process
    lacks, too, and all other errors pass unchanged. `where` names the operation in the error, such as "preparation".
    """
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        if (unreached := _unreached(where, str(error))) is not None:
            # The error's plan may reveal data that was sent to the executors.
            raise unreached from None
        raise


def _unreached(where: str, message: str) -> DependencyError | None:
    if storage := _SCHEME.search(message):
        problem = f"this Spark does not read such URLs ({storage[0]})"
        library = "hadoop-aws" if "s3" in storage[0] else f"Hadoop's connector for {storage['scheme']}://"
        remedy = f"start its server with {library}, of the version of its Hadoop, in spark.jars.packages"
        if (scheme := storage["scheme"]) and "s3" in scheme:
            remedy += f", and set spark.hadoop.fs.{scheme}.impl to org.apache.hadoop.fs.s3a.S3AFileSystem"
    elif (module := _MODULE.search(message)) and find_spec(module[1]) is not None:
        problem = f"the executors do not have the Python module {module[1]}, though this process does"
        remedy = "install it in the Python that they run, PYSPARK_PYTHON, or add its folder to their PYTHONPATH"
    elif other := _OTHER.search(message):
        problem = f"the executors have another version of isthmus ({other[1]})"
        remedy = "install the version of this process in the Python of the executors (PYSPARK_PYTHON)"
    elif (file := _FILE.search(message)) and Path(file["folder"] or next(filter(None, file.groups()))).exists():
        problem = f"the engine cannot open {next(filter(None, file.groups()))}, though this process can"
        remedy = (
            "mount that folder, with the same path and the permission to use it, where Spark's driver and its "
            "executors run"
        )
    elif executor := _EXECUTOR.search(message):
        problem = executor[1]
        remedy = (
            "executors need this package, a way to Redis, and the store: a shared folder with the same path, or a URL "
            "with its credentials in their environment"
        )
    else:
        return None
    remedy += '; or set engine = "sail", which runs on this machine'
    return DependencyError(where, problem, remedy=remedy, passes=False)
