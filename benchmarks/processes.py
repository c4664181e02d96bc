"""Start, watch and end the processes of a benchmark, with all their children."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a command within the context, with its output in `log`."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, **(environment or {})})
    try:
        yield process
    finally:
        children = family(process.pid)[1:]
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for member in [*children, *family(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def wait(ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path, seconds: float = 90) -> None:
    """Wait until `ready`; raise a RuntimeError with the end of the log if the process ends or time is up."""
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{log.stem} did not become ready:\n{log.read_text()[-2000:]}")
        time.sleep(0.02)


def settle(process: "subprocess.Popen[bytes]", seconds: float = 15) -> None:
    """Wait until a server is idle, so that leftover requests do not affect the next load."""

    def worked() -> float:
        total = 0.0
        for member in family(process.pid):
            with suppress(psutil.NoSuchProcess):
                total += sum(member.cpu_times()[:2])
        return total

    deadline, before = time.monotonic() + seconds, worked()
    while time.monotonic() < deadline:
        time.sleep(0.3)
        now = worked()
        if now - before < 0.03:
            return
        before = now


def answers(url: str, body: object) -> bool:
    try:
        return httpx.post(url, json=body, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def last_json(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a command and return the last JSON object it prints."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{command[0]} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@contextmanager
def redis_server(folder: Path) -> "Iterator[redis.Redis]":
    """Run a Redis without persistence on a free loopback port."""
    port = free_port()
    client = redis.Redis(port=port)

    def ready() -> bool:
        with suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    log = folder / "redis.log"
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with started(command, log) as process:
        wait(ready, process, log)
        yield client


def resident_mb(process: "subprocess.Popen[bytes]", module: str) -> float:
    """Return the resident megabytes of the largest process in a family that runs a Python module."""
    return float(max(member.memory_info().rss for member in family(process.pid) if module in member.cmdline())) / 1e6
