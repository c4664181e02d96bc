"""A standalone Apache Spark cluster of this machine: a master, two workers and a Connect server, as separate processes.

They do not see some folders of this machine, like the machines of a real cluster.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.servers import free_port
from tests.transforms.connect import listens

_PATIENCE = 120.0
_WORKERS = 2
_HIDING = ("unshare", "--map-root-user", "--mount")


@contextmanager
def standalone(
    folder: Path, hidden: Sequence[Path] = (), environment: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> Iterator[str]:  # fmt: skip
    """The `sc://` URL of a cluster whose processes see nothing in the folders `hidden`.

    `environment` has further variables of its processes, in which None leaves one out. Logs are in `folder`. Skips the
    test where the kernel lets no user hide folders.
    """
    if hidden and subprocess.run([*_HIDING, "true"], check=False, capture_output=True).returncode:
        pytest.skip("the kernel refuses user namespaces, in which folders can be hidden")
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.submodule_search_locations
    home, master, port = Path(spec.submodule_search_locations[0]), free_port(), free_port()
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SPARK_"))}
    known |= {
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_SCALA_VERSION": "2.13",
        **(environment or {}),
    }
    spark = f"spark://127.0.0.1:{master}"
    java = ["java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", f"{home}/jars/*"]
    deploy = "org.apache.spark.deploy"
    where = ["--host", "127.0.0.1", "--webui-port", "0"]
    with ExitStack() as stack:

        def start(name: str, command: list[str]) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            empty = " && ".join(f"mount -t tmpfs none '{place}'" for place in hidden) or "true"
            inside = [*_HIDING, "sh", "-c", f'{empty} && exec "$@"', "sh", *command] if hidden else command
            process = subprocess.Popen(inside, stdout=log, stderr=log, env=known, cwd=folder, start_new_session=True)
            stack.callback(_end, process)

        start("master", [*java, f"{deploy}.master.Master", *where, "--port", str(master)])
        _wait(master, folder / "master.log")
        for n in range(_WORKERS):
            work = folder / f"worker{n}"
            # Spark starts the copy of a slow task on another host.
            host = ["--host", f"127.0.0.{1 + n}", "--webui-port", "0"]
            start(f"worker{n}", [*java, f"{deploy}.worker.Worker", *host, "--cores", "1", "--memory", "2g",
                                 "--work-dir", str(work), spark])  # fmt: skip
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port),
            "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false",
            "spark.executor.memory": "1g", "spark.sql.shuffle.partitions": "4", **(options or {}),
        }  # fmt: skip
        conf = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        main = "org.apache.spark.sql.connect.service.SparkConnectServer"
        start("connect", [str(home / "bin" / "spark-submit"), "--class", main, "--master", spark, *conf,
                          "spark-internal"])  # fmt: skip
        _wait(port, folder / "connect.log")
        yield f"sc://127.0.0.1:{port}"


def _wait(port: int, log: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not listens(port):
        assert time.monotonic() < end, f"waited in vain, see {log}"
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    # Its session has the JVMs and Python workers that it has started.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
