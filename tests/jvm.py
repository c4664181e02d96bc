"""Start Spark's JVM in half the processor time: sessions in tests end before optimized code would be worth compiling.

`python -m tests.jvm` makes an archive of the classes that a session loads (class data sharing), for `make accept`. A
JVM reads it if the class path and the version of Java are the same, and loads the classes from the jars otherwise.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

_ARCHIVE = Path(sys.prefix) / "spark.jsa"


def options() -> str:
    """Return the options of the JVM, for the environment variable `SPARK_SUBMIT_OPTS`."""
    quick = "-XX:TieredStopAtLevel=1"
    return f'{quick} -Xlog:disable -XX:SharedArchiveFile="{_ARCHIVE}"' if _ARCHIVE.exists() else quick


def _make_archive() -> None:
    from pyspark import SparkContext
    from pyspark.sql import functions

    from isthmus.transforms import engine

    part = _ARCHIVE.with_suffix(f".{os.getpid()}")
    os.environ["SPARK_SUBMIT_OPTS"] = f'-XX:TieredStopAtLevel=1 -Xlog:disable -XX:ArchiveClassesAtExit="{part}"'
    with engine.session("spark") as spark:
        rows = spark.range(1000).withColumn("key", functions.col("id") % 10)
        rows.groupBy("key").agg(functions.sum("id")).orderBy("key").toPandas()
    gateway = SparkContext._gateway
    assert gateway is not None
    # The JVM ends with its standard input, and writes the archive then.
    java = cast("subprocess.Popen[bytes]", gateway.proc)
    assert java.stdin is not None
    java.stdin.close()
    java.wait(300)
    if part.exists():
        part.rename(_ARCHIVE)
    else:
        sys.stdout.write("This JVM wrote no archive of classes; tests with Spark take longer.\n")


if __name__ == "__main__":
    _make_archive()
