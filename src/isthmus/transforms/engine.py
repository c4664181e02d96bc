"""Engines that run the PySpark code through Spark Connect: Sail, Apache Spark on this machine, or a server at a URL."""

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

from isthmus.features.errors import ConfigurationError, DependencyError, Problem, first_line, mask_secrets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENGINES = "sail, spark, or a Spark Connect URL like sc://host:15002"
_CONNECT_PORT = 15002
_JAVA = 17
_PATIENCE = 5.0
"""Timeout, in seconds, for a Spark Connect server."""
_RETRIES = 6
"""About a minute of retries. PySpark's default of 15 takes ten, and a restarted server has lost the session."""
_INSIDE = [("grpc.compression_enabled_algorithms_bitset", 1), ("grpc.use_local_subchannel_pool", 1)]
"""Options of the connection to a server in this process. Without compression, answers take a sixth of the time. With
its own pool, gRPC does not reuse the broken connection of an earlier server that had the same port."""
_PORTS = 5
"""Free ports to try: another process may take one before Spark does."""
_JVM_TOKEN = secrets.token_urlsafe()
"""The token of this process's JVM, which cannot be changed after its start."""
_PARTITION = 64 << 20
"""Least bytes of memory per partition of a query, if memory is limited."""
_LISTENS = 1.0
"""Maximum seconds until Sail's server listens for signals."""


@contextmanager
def session(engine: str, threads: int = 2, memory: int | None = None) -> "Iterator[SparkSession]":
    """Open a Spark session for a `with` block: on "sail", on local "spark", or on a server at a Spark Connect URL.

    The session uses the time zone UTC and ANSI mode. For "sail" and "spark", this process runs a server during the
    block. `threads` is the number of cores for "spark", and has no effect otherwise. `memory` limits the bytes
    that "sail" and "spark" use before they write temporary files; None for the engine's default. The session is stopped
    after the block. Sets environment variables of PySpark, some of them for good. Waits up to 5 seconds to connect to a
    URL, and 5 more for an answer.

    Raises:
        ConfigurationError: the engine's name is unknown.
        DependencyError: pyspark, pysail or Java 17 is missing, Spark does not start, or no server answers at the URL.
    """
    try:
        import pyspark  # noqa: F401 - only whether it is installed
    except ImportError as error:
        raise _missing("pyspark") from error
    if engine == "sail":
        with _variables(None, memory), _sail() as url, _connect(url, inside=True) as spark:
            yield spark
    elif engine == "spark":
        _require_java()
        with _variables(_JVM_TOKEN), _connect(_spark(threads, memory)) as spark:
            yield spark
    elif engine.startswith("sc://"):
        _require_listener(engine)
        with _connect(engine) as spark:
            yield spark
    else:
        raise ConfigurationError("isthmus.toml", [Problem("engine", repr(engine), ENGINES)])


@contextmanager
def _connect(url: str, *, inside: bool = False) -> "Iterator[SparkSession]":
    """Open a session; `inside` is True if its server runs in this process."""
    from pyspark.errors import PySparkException
    from pyspark.logger import PySparkLogger
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.client.retries import DefaultPolicy
    from pyspark.sql.connect.session import SparkSession as Session

    # This logger repeats each error of the engine on stderr, with its stack.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel("CRITICAL")
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    # A new session, even if the process already has a session.
    spark = Session.builder.channelBuilder(DefaultChannelBuilder(url, _INSIDE if inside else None)).create()
    try:
        spark.client.set_retry_policies([DefaultPolicy(max_retries=_RETRIES)])
        try:
            spark.conf.set("spark.sql.session.timeZone", "UTC")
            spark.conf.set("spark.sql.ansi.enabled", "true")
            # A folder `zip=007` is the text 007, as for Sail, and not the number 7.
            spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
        except PySparkException as error:
            raise _silence(url, first_line(error)) from error
        if inside:
            # The connection cannot break. Reattaching would cost a request per batch of rows, without a deadline.
            spark.client.disable_reattachable_execute()
            spark.client.set_retry_policies([])
            # PySpark would look for IPython in each call, to name the call in messages, which Sail does not do.
            spark.conf.set("spark.python.sql.dataFrameDebugging.enabled", "false")
        yield cast("SparkSession", spark)
    finally:
        spark.stop()


def _spark(threads: int, memory: int | None) -> str:
    """Start a Spark Connect server in this process's JVM; return its URL. Stopping the session stops the server."""
    from pyspark.sql.connect.session import SparkSession

    options = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "4g" if memory is None else f"{max(memory >> 20, 512)}m",
        "spark.log.level": "OFF", "spark.sql.shuffle.partitions": "8", "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }  # fmt: skip
    if not any("GC" in os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")):
        # Java's default collects concurrently, on scarce cores. Setting two collectors is an error.
        options["spark.driver.extraJavaOptions"] = "-XX:+UseParallelGC"
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Its Python workers need this package, so they must use this environment, not the first Python on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Like `builder.remote("local[2]")`, which always listens on port 15002 of all interfaces.
    os.environ["SPARK_LOCAL_REMOTE"] = "1"
    for again in reversed(range(_PORTS)):
        port = _free_port()
        try:
            SparkSession._start_connect_server(
                f"local[{threads}]", options | {"spark.connect.grpc.binding.port": str(port)}
            )
            break
        except Exception as error:  # py4j's errors have no common base
            if again and "BindException" in str(error):
                continue
            del os.environ["SPARK_LOCAL_REMOTE"]
            problem = f"Apache Spark did not start ({first_line(error)})"
            remedy = 'see its output above, or set engine = "sail"'
            raise DependencyError("engine spark", problem, remedy=remedy) from error
    return f"sc://localhost:{port}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def _variables(token: str | None, memory: int | None = None) -> Iterator[None]:
    """Set PySpark's token and Sail's memory limit for the block. PySpark insists on TLS with a token; Sail has none."""
    values = {"SPARK_CONNECT_AUTHENTICATE_TOKEN": token}
    if memory is not None:
        # Sail reads these when a server starts. Each partition of a sort reserves memory: a small pool allows few.
        partitions = max(1, min(os.cpu_count() or 1, memory // _PARTITION))
        values |= {"SAIL_RUNTIME__MEMORY_POOL__TYPE": "fair", "SAIL_RUNTIME__MEMORY_POOL__FAIR__MAX_SIZE": str(memory),
                   "SAIL_EXECUTION__DEFAULT_PARALLELISM": str(partitions)}  # fmt: skip
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _sail() -> Iterator[str]:
    # Sail reads these variables when it is loaded. Users should not see its progress lines. The long timeout keeps an
    # idle session alive, for example while its rows are joined here; the server ends with the session anyway.
    os.environ.setdefault("RUST_LOG", "off")
    os.environ.setdefault("SAIL_SPARK__SESSION_TIMEOUT_SECS", str(7 * 86_400))
    try:
        from pysail.spark import SparkConnectServer
    except ImportError as error:
        raise _missing("pysail") from error
    interrupts = _Interrupts()
    server = SparkConnectServer(ip="127.0.0.1", port=0)
    try:
        server.start(background=True)
        interrupts.restore()
        yield f"sc://127.0.0.1:{server.listening_address[1]}"
    finally:
        if server.running:
            server.stop()


@cache
class _Interrupts:
    """Restores the process's Ctrl-C handler, which Sail's first server replaces by one that ends the server at once."""

    def __init__(self) -> None:
        # `signal.signal` works only in the main thread.
        self._get, self._set = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
        self._get.restype = self._set.restype = ctypes.c_void_p
        self._set.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._handler = self._get(signal.SIGINT)
        self._restored = False

    def restore(self) -> None:
        end = time.monotonic() + _LISTENS
        while not self._restored and time.monotonic() < end:
            if self._get(signal.SIGINT) != self._handler:
                self._set(signal.SIGINT, self._handler)
                break
            time.sleep(0.001)
        # Later servers of this process do not replace it.
        self._restored = True


def _missing(package: str) -> DependencyError:
    return DependencyError("engine", f"the package {package} is not installed",
                           remedy="install it with: pip install 'isthmus[transforms]'")  # fmt: skip


def _require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        raise _no_java("Java is not installed")
    if not os.access(java, os.X_OK):
        raise _no_java(f"JAVA_HOME is {home}, which has no bin/java")
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    version = re.search(r'version "(\d+)', shown)
    if version is None or int(version[1]) < _JAVA:
        raise _no_java(shown.strip().partition("\n")[0] or "no answer from java")


def _no_java(problem: str) -> DependencyError:
    remedy = 'install the package openjdk-17-jre-headless, or set engine = "sail"'
    return DependencyError("engine spark", problem, expected=f"Java {_JAVA} or later", remedy=remedy)


def _require_listener(url: str) -> None:
    # PySpark would retry for minutes before it reports that no server answers.
    import grpc
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client import DefaultChannelBuilder

    try:
        parts = urlsplit(url)
        # Without a host the builder refuses the URL, and a connection to "" would go to this machine.
        if parts.hostname:
            socket.create_connection((parts.hostname, parts.port or _CONNECT_PORT), timeout=_PATIENCE).close()
        with DefaultChannelBuilder(url).toChannel() as channel:
            grpc.channel_ready_future(channel).result(_PATIENCE)
    except grpc.FutureTimeoutError as error:
        raise _silence(url, "a server listens there, but it does not speak gRPC") from error
    except (OSError, ValueError, PySparkException) as error:
        # Without the cause, which may quote a token.
        raise _silence(url, str(error)) from None


def _silence(url: str, why: str) -> DependencyError:
    # The rest of the URL may contain a token, and PySpark's messages quote parts of it.
    place, why = map(mask_secrets, (url.partition("/;")[0], why))
    return DependencyError(
        f"engine {place}", f"does not answer ({why})",
        remedy='start the Spark Connect server, correct `engine`, or set engine = "sail"',
    )  # fmt: skip
