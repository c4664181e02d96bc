import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.serving.support import CONTRACT, fill, free_port, serving, wait

PASSWORD = "never-to-be-shown"  # noqa: S105
ASKED: dict[str, Any] = {"features": ["punctuality:flights"], "entities": {"carrier": ["B6"]}}


@contextmanager
def redis_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A Redis that can be killed and started again on the same port with the same data."""
    binary = shutil.which("redis-server")
    assert binary, "install the package redis-server"
    arguments = [
        "--port", str(port), "--requirepass", PASSWORD, "--dir", str(folder), "--save", "",
        "--appendonly", "yes", "--appendfsync", "always",
    ]  # fmt: skip
    process = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, password=PASSWORD) as client:
            wait(lambda: _answers(client), "Redis")
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False


def test_redis_is_killed_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://:{PASSWORD}@127.0.0.1:{port}"
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, url) as server:
        with redis_server(tmp_path, port):
            fill(url)
            assert server.lookup(**ASKED).json()["results"][1]["values"] == [7]
        start = time.monotonic()
        for path in ("/get-online-features", "/readyz"):
            gone = server.lookup(**ASKED) if path == "/get-online-features" else server.http.get(path)
            assert (gone.status_code, gone.json()["error"]) == (503, "DependencyError")
            assert gone.headers["retry-after"] == "1"
            assert f"127.0.0.1:{port}" in gone.json()["where"]
            assert PASSWORD not in gone.text
        assert time.monotonic() - start < 1
        with redis_server(tmp_path, port) as process:
            for _ in range(3):
                assert server.lookup(**ASKED).json()["results"][1]["values"] == [7]
            # Redis that is there and says nothing is as good as gone.
            os.kill(process.pid, signal.SIGSTOP)
            start = time.monotonic()
            assert server.lookup(**ASKED).status_code == 503
            assert time.monotonic() - start < 6
            os.kill(process.pid, signal.SIGCONT)
            assert server.lookup(**ASKED).status_code == 200
    assert PASSWORD not in server.log.read_text()
