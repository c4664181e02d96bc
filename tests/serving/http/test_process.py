import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from isthmus.features.errors import ConfigurationError
from isthmus.orchestration.server.serve import running
from isthmus.serving.http.protocol import LEAVING_SECONDS, WAIT_SECONDS
from isthmus.serving.limits import Limits
from isthmus.serving.process import listen, start
from isthmus.serving.settings import VARIABLE, ServerSettings
from tests.serving.support import CONTRACT, Server, free_port, make_package, read_all, serving, wait

HEAVY = ("pyarrow", "feast", "torch", "pyspark", "dagster", "pandas", "deltalake", "duckdb", "sklearn", "typer")


def settings(folder: Path, **changed: object) -> ServerSettings:
    given = {"contract": str(folder / "c"), "deployment": str(folder / "d"), "keys": str(folder / "k")}
    return msgspec.convert({**given, "redis": "redis://127.0.0.1:1", **changed}, ServerSettings)


def test_a_worker_loads_nothing_heavy(tmp_path: Path, redis_url: str) -> None:
    # Of its own: one that has answered ten thousand rows keeps the memory for the next such answer.
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(tmp_path / "package")
    with serving(tmp_path, redis_url) as server:
        server.deploy(package)
        wait(lambda: server.http.get("/readyz").json().get("model") == "late", "the model")
        # A prediction with its lookup first, so that everything lazy is there too.
        assert server.predict(entities={"carrier": ["UA"]}, request={"distance": [1]}).status_code == 200
        place = Path(f"/proc/{server.process.pid}")
        maps, status = (place / "maps").read_text(), (place / "status").read_text()
    loaded = {part for line in maps.splitlines() for part in line.split("/")}
    assert "numpy" in loaded
    assert loaded.isdisjoint(HEAVY)
    (resident,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    assert resident < 130_000


def test_the_application_imports_nothing_heavy() -> None:
    script = (
        f"import sys, isthmus.serving.http.app, isthmus.serving.http.server; print({set(HEAVY)} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_sigint_is_a_clean_end(tmp_path: Path) -> None:
    with serving(tmp_path, "redis://127.0.0.1:1") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0


def _asked(client: http.client.HTTPConnection, body: bytes) -> bool:
    """Whether the answer to a request says that it is the connection's last."""
    client.request("POST", "/get-online-features", body)
    answer = client.getresponse()
    assert (answer.status, bool(answer.read())) == (200, True)
    return answer.will_close


def _asked_until_the_end(client: http.client.HTTPConnection, body: bytes) -> bool:
    """Asks again and again until an answer is the last; False if this thread was held up longer than a server waits."""
    while True:
        began = time.monotonic()
        try:
            if _asked(client, body):
                return True
        except ConnectionError:
            assert time.monotonic() - began > LEAVING_SECONDS, "a request that came in time has no answer"
            return False


@pytest.mark.accept
@pytest.mark.parametrize("workers", [1, 2])
def test_requests_under_way_are_answered_before_the_end(tmp_path: Path, redis_url: str, workers: int) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    body = b'{"features": ["punctuality:flights"], "entities": {"carrier": ["B6"]}}'
    head = f"POST /get-online-features HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(tmp_path, redis_url, workers=workers) as server, ExitStack() as opened:
        address = ("127.0.0.1", server.http.base_url.port or 0)

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection(address, timeout=10))

        slow = [connect() for _ in range(8)]
        for connection in slow:
            connection.sendall(head + body[:20])
        idle = connect()
        kept = [http.client.HTTPConnection(*address, timeout=10) for _ in range(4)]
        for client in kept:
            opened.callback(client.close)
            assert not _asked(client, body)
        with ThreadPoolExecutor(len(kept)) as pool:
            ends = [pool.submit(_asked_until_the_end, client, body) for client in kept]
            server.process.send_signal(signal.SIGTERM)
            quick = [end.result() for end in ends]
            assert any(quick), "no client was as quick as a server may expect"

        def refused() -> bool:
            try:
                with socket.create_connection(address, timeout=10) as late:
                    late.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    return False
            except OSError:
                return True

        wait(refused, "new connections to be refused")
        assert server.process.poll() is None
        assert idle.recv(10) == b""
        for connection in slow:
            connection.sendall(body[20:])
            top, _, answer = read_all(connection).partition(b"\r\n\r\n")
            assert top.startswith(b"HTTP/1.1 200")
            assert json.loads(answer)["results"][1]["values"] == [7]
        assert server.process.wait(10) == 0


@pytest.mark.accept
def test_an_idle_connection_outlives_what_clients_keep(tmp_path: Path, redis_url: str) -> None:
    """httpx and others reuse a connection for 5 s. A server that closes it then would lose a request now and then."""
    with serving(tmp_path, redis_url) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.http.base_url.port or 0, timeout=10)
        with closing(client):
            client.request("GET", "/healthz")
            assert client.getresponse().read()
            connection = client.sock
            time.sleep(WAIT_SECONDS + 0.5)
            client.request("GET", "/healthz")
            assert client.getresponse().status == 200
            assert client.sock is connection, "the client connected again"


def test_what_hangs_does_not_hold_up_the_end(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, limits=Limits(deadline_seconds=1)) as server:
        with socket.create_connection(("127.0.0.1", server.http.base_url.port or 0), timeout=10) as connection:
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
            time.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 408")
        assert server.process.wait(10) == 0


@pytest.mark.accept
def test_one_that_does_not_end_is_killed_by_who_started_it(tmp_path: Path) -> None:
    told = settings(tmp_path, port=free_port(), limits=Limits(deadline_seconds=0.1))

    def up() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{told.port}/healthz").status_code == 200
        except httpx.TransportError:
            return False

    with (tmp_path / "log").open("wb") as log, running(told, log) as child:
        wait(up, "the server")
        child.send_signal(signal.SIGSTOP)
    assert child.returncode == -signal.SIGKILL


def test_a_log_that_cannot_be_written_ends_neither_the_server_nor_its_look_at_files(tmp_path: Path) -> None:
    told = settings(tmp_path, port=free_port())

    def status() -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{told.port}/status").status_code
        except httpx.TransportError:
            return 0

    with Path("/dev/full").open("wb") as full, running(told, full):
        wait(lambda: status() == 503, "the server")
        Path(told.contract).write_bytes(CONTRACT.dumps())
        wait(lambda: status() == 200, "the contract")


@pytest.mark.accept
def test_workers_share_the_port_and_end_together(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, workers=2) as server:
        assert server.http.get("/readyz").status_code == 200
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        assert len(children) >= 2
    wait(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "the workers to end")


@pytest.mark.parametrize("host", ["203.0.113.1", "no host"])
def test_a_host_that_is_none_of_this_machine_is_named_and_not_the_port(host: str) -> None:
    problem = rf"{host}:0: cannot be listened on \(.*\); expected an address of this machine. Choose another host, such"
    with pytest.raises(ConfigurationError, match=problem):
        listen("server", host, 0, "choose another port")


def test_a_taken_port_is_one_sentence_and_exit_code_2(tmp_path: Path, server: Server) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        assert start(settings(tmp_path, port=server.http.base_url.port), output).wait(30) == 2
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["problem"] == (
        f"server: 127.0.0.1:{server.http.base_url.port}: cannot be listened on (Address already in use); "
        "expected a free port. Stop the program that uses it, or choose another port"
    )
    # On a terminal, a person reads it.
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "wb") as output:
        assert start(settings(tmp_path, port=server.http.base_url.port), output).wait(30) == 2
    said = os.read(controller, 4096).decode()
    os.close(controller)
    assert said == f"isthmus: {line['problem']}\r\n"


@pytest.mark.parametrize("text", [None, "{", "{}", '{"host": 1}'])
def test_a_process_without_settings_says_so(text: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if text is not None:
        environment[VARIABLE] = text
    arguments = [sys.executable, "-m", "isthmus.serving"]
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2
    assert VARIABLE in json.loads(ended.stderr)["problem"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])  # noqa: S104
def test_listening_beyond_loopback_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigurationError, match="there are no API keys"):
        settings(tmp_path, host=host)


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://:secret@localhost", "redis://:secret@localhost:port"])
def test_a_url_that_is_none_is_refused_without_its_password(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigurationError, match="not the URL of a Redis") as caught:
        settings(tmp_path, redis=url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_every_problem_of_the_settings_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(tmp_path, host="::", port=70_000, workers=0)
    assert [problem.where for problem in caught.value.problems] == ["host", "port", "workers"]


@pytest.mark.accept
def test_serve_runs_a_child_and_passes_sigterm_on(tmp_path: Path) -> None:
    port = free_port()
    parent = _parent(settings(tmp_path, port=port))
    wait(lambda: _up(port), "the server", 60)
    parent.terminate()
    assert parent.wait(15) == 0
    assert not _up(port)


@pytest.mark.accept
@pytest.mark.parametrize("workers", [1, 2])
def test_the_password_of_redis_is_not_in_the_environment(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "redis://:open-sesame@127.0.0.1:1"
    monkeypatch.setenv("ISTHMUS_STORES__ONLINE", url)
    with serving(tmp_path, url, workers=workers) as server:
        parent = psutil.Process(server.process.pid)
        tree = [parent, *parent.children(recursive=True)]
        assert len(tree) >= workers
        for process in tree:
            assert "open-sesame" not in str(process.environ()) + str(process.cmdline())


def test_a_server_in_its_own_process_has_no_password_in_its_environment(tmp_path: Path) -> None:
    (tmp_path / "isthmus.toml").write_text(
        '[project]\nname = "p"\n[stores]\nonline = "redis://:open-sesame@127.0.0.1:1"\n'
    )
    port = free_port()
    command = [str(Path(sys.executable).with_name("isthmus")), "serve", "--port", str(port)]
    server = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: _up(port), "the server", 60)
        process = psutil.Process(server.pid)
        assert "isthmus.serving" in process.cmdline()
        assert "open-sesame" not in str(process.environ()) + str(process.cmdline())
    finally:
        server.terminate()
        assert server.wait(15) == 0


@pytest.mark.accept
@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_and_its_workers_end_with_a_killed_parent(tmp_path: Path, workers: int) -> None:
    port = free_port()
    _nothing_outlives(_parent(settings(tmp_path, port=port, workers=workers)), port, least=workers)


@pytest.mark.accept
def test_workers_end_with_a_killed_server(tmp_path: Path) -> None:
    port = free_port()
    _nothing_outlives(start(settings(tmp_path, port=port, workers=2)), port, least=2)


def _nothing_outlives(process: "subprocess.Popen[bytes]", port: int, *, least: int) -> None:
    """Kills a process as soon as somebody answers on the port, and waits for its children, of which there are some."""
    wait(lambda: _up(port), "the server", 60)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert len(children) >= least
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def _parent(chosen: ServerSettings) -> "subprocess.Popen[bytes]":
    """A process that runs a server."""
    script = (
        "import sys, msgspec; from isthmus.serving.process import serve; "
        "from isthmus.serving.settings import ServerSettings; "
        "sys.exit(serve(msgspec.json.decode(sys.argv[1], type=ServerSettings)))"
    )
    return subprocess.Popen([sys.executable, "-c", script, msgspec.json.encode(chosen)], stderr=subprocess.DEVNULL)


def _up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    except httpx.TransportError:
        return False
