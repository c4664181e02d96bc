"""States in which a real Redis answers and refuses: how each is brought about, and what is to be said of it."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import redis

PASSWORD = "never-to-be-shown"  # noqa: S105
READER = "reader"
"""A user who may look up, and nothing else."""
HALF = "half"
"""A user who may run scripts, but not write in them."""

ARGUMENTS = (
    "--bind", "127.0.0.1", "--requirepass", PASSWORD,
    "--user", READER, "on", f">{PASSWORD}", "~*", "+hmget", "+ping",
    "--user", HALF, "on", f">{PASSWORD}", "~*", "+@all", "-hset",
)  # fmt: skip


@dataclass(frozen=True)
class State:
    """A state of a server that refuses writes.

    Attributes:
        entered: surrounds it, given a client that may do anything, and the folder of the server.
        found: what is to be said.
        passes: whether a caller is to try again.
        reads: whether lookups are answered meanwhile.
    """

    entered: Callable[[redis.Redis, Path], AbstractContextManager[None]]
    found: str
    passes: bool = False
    reads: bool = True


@contextmanager
def _configured(client: redis.Redis, name: str, value: str | int) -> Iterator[None]:
    before = cast("dict[str, str]", client.config_get(name))[name]
    client.config_set(name, value)
    try:
        yield
    finally:
        client.config_set(name, before)


@contextmanager
def _replica(client: redis.Redis, _folder: Path) -> Iterator[None]:
    client.replicaof("127.0.0.1", 1)
    try:
        yield
    finally:
        client.replicaof("NO", "ONE")


@contextmanager
def _lost_replica(client: redis.Redis, folder: Path) -> Iterator[None]:
    with _configured(client, "replica-serve-stale-data", "no"), _replica(client, folder):
        yield


@contextmanager
def _unsaved(client: redis.Redis, folder: Path) -> Iterator[None]:
    """The folder that Redis would save into is gone, which is the same to it as a full disk."""
    shutil.rmtree(folder)
    with _configured(client, "save", "3600 1000000"):
        client.bgsave()
        while cast("dict[str, str]", client.info("persistence"))["rdb_last_bgsave_status"] != "err":
            time.sleep(0.01)
        yield
        client.config_set("stop-writes-on-bgsave-error", "no")


@contextmanager
def _busy(client: redis.Redis, _folder: Path) -> Iterator[None]:
    """A script of somebody else does not end."""

    def forever() -> None:
        # Ended by SCRIPT KILL.
        with suppress(redis.ResponseError):
            client.eval("while true do end", 0)

    with _configured(client, "lua-time-limit", 1):
        thread = threading.Thread(target=forever)
        thread.start()
        try:
            time.sleep(0.3)
            yield
        finally:
            client.script_kill()
            thread.join()


STATES = {
    "OOM": State(lambda client, _: _configured(client, "maxmemory", 1), "is out of memory and takes no writes"),
    "READONLY": State(_replica, "is a replica and takes no writes"),
    "MASTERDOWN": State(_lost_replica, "is a replica without its primary", passes=True, reads=False),
    "NOREPLICAS": State(
        lambda client, _: _configured(client, "min-replicas-to-write", 1), "has too few replicas", passes=True
    ),
    "BUSY": State(_busy, "is busy with a script of another client", passes=True, reads=False),
    "MISCONF": State(_unsaved, "cannot save to its disk and takes no writes"),
}


def fill_for_loading(client: redis.Redis) -> None:
    """Stores so much that loading it takes a while, if it is told to be slow."""
    for n in range(200):
        client.set(f"ballast:{n}", os.urandom(100_000))
    client.save()


SLOW = ("--key-load-delay", "15000", "--rdbcompression", "no")
"""Arguments with which loading what `fill_for_loading` has stored takes three seconds."""


@contextmanager
def loading(executable: str, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server that loads what is in its folder, from before it can answer anything else."""
    command = [executable, "--port", str(port), *ARGUMENTS, "--dir", str(folder), "--save", "", *SLOW]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
