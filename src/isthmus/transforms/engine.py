"""Engines: where the PySpark code runs. Every engine is a Spark Connect session to our code.

sail          the PySpark API on an embedded Rust engine, no JVM (https://lakesail.com)
spark         Apache Spark in a server that this process starts; needs Java 17
sc://host     any Spark Connect endpoint
"""

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from isthmus.features.errors import ConfigurationError, DependencyError, Problem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENGINES = "sail, spark, or a Spark Connect URL like sc://host:15002"
_CONNECT_PORT = 15002
_JAVA = 17
_PATIENCE = 5.0
"""Seconds that a Spark Connect server has to answer."""
_RETRIES = 6
"""How often a call is tried again, in about a minute. PySpark's own 15 times take ten: a server that is gone by then
has lost the session with it."""
_LISTENS = 1.0
"""Seconds after which Sail's server is taken not to listen for signals."""


@contextmanager
def session(engine: str, threads: int = 2) -> "Iterator[SparkSession]":
    """A session on an engine, ended with the block.

    Args:
        engine: "sail", "spark", or a Spark Connect URL.
        threads: cores that a local Apache Spark may use.

    Raises:
        ConfigurationError: no engine has this name.
        DependencyError: pyspark, pysail or Java is missing, or nothing answers at the URL.
    """
    try:
        import pyspark  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise _missing("pyspark") from error
    if engine == "sail":
        with _token(None), _sail() as url, _connect(url) as spark:
            yield spark
    elif engine == "spark":
        _require_java()
        with _token(_local_token()), _connect(_spark(threads)) as spark:
            yield spark
    elif engine.startswith("sc://"):
        _require_listener(engine)
        with _connect(engine) as spark:
            yield spark
    else:
        raise ConfigurationError("isthmus.toml", [Problem("engine", repr(engine), ENGINES)])


@contextmanager
def _connect(url: str) -> "Iterator[SparkSession]":
    from pyspark.errors import PySparkException
    from pyspark.logger import PySparkLogger
    from pyspark.sql.connect.client.retries import DefaultPolicy
    from pyspark.sql.connect.session import SparkSession as Session

    # It repeats each error of the engine on stderr, with its stack; the error itself says enough.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel("CRITICAL")
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    # A session of our own, also where the user's code around us has one already.
    spark = Session.builder.remote(url).create()
    spark.client.set_retry_policies([DefaultPolicy(max_retries=_RETRIES)])
    try:
        try:
            spark.conf.set("spark.sql.session.timeZone", "UTC")
            spark.conf.set("spark.sql.ansi.enabled", "true")
        except PySparkException as error:
            raise _silence(url, str(error).strip().partition("\n")[0]) from error
        yield cast("SparkSession", spark)
    finally:
        spark.stop()


def _spark(threads: int) -> str:
    """Starts Apache Spark in a JVM of this process, which ends with the session; returns the URL of its server."""
    from pyspark.sql.connect.session import SparkSession

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.memory": "4g",
        "spark.log.level": "OFF", "spark.sql.shuffle.partitions": "8", "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }  # fmt: skip
    if not any("GC" in os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")):
        # Java's own choice works beside the program, on cores that are few here; two choices would be an error.
        options["spark.driver.extraJavaOptions"] = "-XX:+UseParallelGC"
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Its Python workers need this package: they are to be of this environment, not of whatever is first on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # What `builder.remote("local[2]")` does, but for the port: that one always takes 15002, of all interfaces.
    os.environ["SPARK_LOCAL_REMOTE"] = "1"
    try:
        SparkSession._start_connect_server(f"local[{threads}]", options)
    except Exception as error:  # py4j's errors have no common base
        del os.environ["SPARK_LOCAL_REMOTE"]
        found = f"Apache Spark did not start ({str(error).strip().partition(chr(10))[0]})"
        raise DependencyError("engine spark", found, remedy='see its output above, or set engine = "sail"') from error
    return f"sc://localhost:{port}"


@contextmanager
def _token(value: str | None) -> Iterator[None]:
    """What PySpark shows to a server in the block. It insists on TLS wherever it has a token, so Sail gets none."""
    name = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@cache
def _local_token() -> str:
    """The secret between this process and its JVM, which keeps the first one it is given."""
    return secrets.token_urlsafe()


@contextmanager
def _sail() -> Iterator[str]:
    # Sail reads its log level when it is loaded; its progress lines are not for the user of a step.
    os.environ.setdefault("RUST_LOG", "off")
    try:
        from pysail.spark import SparkConnectServer
    except ImportError as error:
        raise _missing("pysail") from error
    interrupts = _interrupts()
    server = SparkConnectServer(ip="127.0.0.1", port=0)
    server.start(background=True)
    interrupts.take_back()
    try:
        yield f"sc://127.0.0.1:{server.listening_address[1]}"
    finally:
        server.stop()


@cache
def _interrupts() -> "_Interrupts":
    return _Interrupts()


class _Interrupts:
    """What Ctrl-C does in this process, kept from Sail.

    Sail's first server listens for the signal as well, from some moment after its start on. It would end on it at once,
    and leave its client saying goodbye to nobody for ten minutes.
    """

    def __init__(self) -> None:
        # `signal.signal` is for the main thread alone.
        self._get, self._set = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
        self._get.restype = self._set.restype = ctypes.c_void_p
        self._set.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._own = self._get(signal.SIGINT)
        self._taken = False

    def take_back(self) -> None:
        """Waits until a server that has just been started listens, and takes the signal back."""
        end = time.monotonic() + _LISTENS
        while not self._taken and time.monotonic() < end:
            if self._get(signal.SIGINT) != self._own:
                self._set(signal.SIGINT, self._own)
                break
            time.sleep(0.001)
        # Later servers of this process share what the first one has set up.
        self._taken = True


def _missing(package: str) -> DependencyError:
    return DependencyError("engine", f"the package {package} is not installed",
                           remedy="install it with: pip install 'isthmus[transforms]'")  # fmt: skip


def _require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        raise _no_java("Java is not installed")
    if not os.access(java, os.X_OK):
        raise _no_java(f"JAVA_HOME is {home}, which holds no bin/java")
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    version = re.search(r'version "(\d+)', shown)
    if version is None or int(version[1]) < _JAVA:
        raise _no_java(shown.strip().partition("\n")[0] or "no answer from java")


def _no_java(found: str) -> DependencyError:
    remedy = 'install the package openjdk-17-jre-headless, or set engine = "sail"'
    return DependencyError("engine spark", found, expected=f"Java {_JAVA} or later", remedy=remedy)


def _require_listener(url: str) -> None:
    """PySpark itself would retry for minutes before it says that nobody is there."""
    import grpc
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client import DefaultChannelBuilder

    try:
        parts = urlsplit(url)
        # Without a host the URL is refused by the builder; a connection to "" would go to this machine.
        if parts.hostname:
            socket.create_connection((parts.hostname, parts.port or _CONNECT_PORT), timeout=_PATIENCE).close()
        with DefaultChannelBuilder(url).toChannel() as channel:
            grpc.channel_ready_future(channel).result(_PATIENCE)
    except grpc.FutureTimeoutError as error:
        raise _silence(url, "something listens there, but it does not speak gRPC") from error
    except (OSError, ValueError, PySparkException) as error:
        raise _silence(url, str(error)) from error


def _silence(url: str, why: str) -> DependencyError:
    place = url.partition("/;")[0]  # what follows may hold a token
    return DependencyError(
        f"engine {place}", f"does not answer ({why})",
        remedy='start the Spark Connect server, correct `engine`, or set engine = "sail"',
    )  # fmt: skip
