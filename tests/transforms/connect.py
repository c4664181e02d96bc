"""Apache Spark's own Connect server in a process of its own, as a cluster runs it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.servers import free_port

_PATIENCE = 120.0
"""Seconds; a busy machine takes long to start a JVM."""


@contextmanager
def connect_server(log: Path) -> Iterator[str]:
    """The `sc://` URL of a server that ends with the block; what it says goes to `log`."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.submodule_search_locations
    home, port = Path(spec.submodule_search_locations[0]), free_port()
    options = {
        "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "4", "spark.ui.enabled": "false",
    }  # fmt: skip
    main = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [str(home / "bin" / "spark-submit"), "--class", main, "--master", "local[2]"]
    for name, value in options.items():
        command += ["--conf", f"{name}={value}"]
    environment = os.environ | {"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    for name in (
        "SPARK_LOCAL_REMOTE",
        "SPARK_CONNECT_MODE_ENABLED",
        "SPARK_REMOTE",
        "SPARK_CONNECT_AUTHENTICATE_TOKEN",
    ):
        environment.pop(name, None)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "spark-internal"], stdout=sink, stderr=sink, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _PATIENCE
        while not listens(port):
            assert process.poll() is None, f"the server ended, see {log}"
            assert time.monotonic() < deadline, f"waited in vain for the server, see {log}"
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"
    finally:
        # The script and the JVM that it starts.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
