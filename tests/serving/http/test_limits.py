import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect as connect_redis
from isthmus.features.types import String
from isthmus.serving.http.protocol import WAIT_SECONDS
from isthmus.serving.limits import Limits
from isthmus.serving.wire.errors import TooLargeError
from tests.serving.support import (
    CONTRACT,
    FLIGHT,
    NOW,
    PUNCTUALITY,
    Server,
    contract_of,
    make_package,
    read_all,
    serving,
    view,
    wait,
    write,
)

ASKED: dict[str, Any] = {"features": ["punctuality:flights"], "entities": {"carrier": ["B6"]}}
SMALL = Limits(body_bytes=1000, rows=10, values=20, concurrency=2, deadline_seconds=1.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Server]:
    """A server with small limits, and a model."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url, limits=SMALL) as running:
        running.deploy(make_package(folder / "package"))
        wait(lambda: running.http.get("/readyz").json().get("model") == "late", "the model")
        yield running


def head(length: int, path: str = "/get-online-features") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


Connect = Callable[[bytes], socket.socket]


@pytest.fixture
def connect(small: Server) -> Iterator[Connect]:
    """Opens a connection of its own and sends some bytes."""
    with ExitStack() as opened:

        def connect(sent: bytes) -> socket.socket:
            address = ("127.0.0.1", small.http.base_url.port or 0)
            connection = opened.enter_context(socket.create_connection(address, timeout=10))
            connection.sendall(sent)
            return connection

        yield connect


def answer(received: bytes) -> tuple[int, dict[str, Any]]:
    top, _, body = received.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    ("path", "asked", "found", "expected"),
    [
        ("/get-online-features", {"features": ["everything:a"], "entities": {"flight": list(range(11))}},
         "11 rows", "10 at most"),
        ("/get-online-features", {"features": [f"everything:{c}" for c in "abc"], "entities": {"flight": [1] * 7}},
         "7 rows of 3 features are 21 values", "20 at most"),
        ("/get-online-features", {**ASKED, "entities": {"carrier": ["B6" * 500]}}, "bytes", "1,000 at most"),
        ("/predict", {"entities": {"carrier": ["UA"] * 11}, "request": {"distance": [1] * 11}}, "11 rows", "10 at"),
        ("/predict", {"entities": {"carrier": ["UA"] * 6}, "request": {"distance": [1] * 6}},
         "6 rows of 4 features are 24 values", "20 at most"),
    ],
)  # fmt: skip
def test_too_much_is_refused(small: Server, path: str, asked: object, found: str, expected: str) -> None:
    refused = small.http.post(path, json=asked)
    assert (refused.status_code, refused.json()["error"]) == (413, "TooLargeError")
    assert found in refused.json()["found"]
    assert expected in refused.json()["expected"]


def test_what_is_just_within_the_limits_is_answered(small: Server) -> None:
    for features, rows in (("a", 10), ("ab", 10), ("abc", 6)):
        asked = {"features": [f"everything:{c}" for c in features], "entities": {"flight": [1] * rows}}
        assert small.lookup(**asked).status_code == 200
    for length, status in ((1000, 200), (1001, 413)):
        body = json.dumps(ASKED).encode().ljust(length)
        assert small.http.post("/get-online-features", content=body).status_code == status
        assert small.http.post("/get-online-features", content=iter([body])).status_code == status


def test_the_boundary_of_the_values() -> None:
    Limits(values=20).require_values("entities", 4, 5)
    with pytest.raises(TooLargeError, match=r"3 rows of 7 features are 21 values; expected 20 at most"):
        Limits(values=20).require_values("entities", 3, 7)


@pytest.mark.parametrize("dribble", [b" ", None])
def test_a_body_that_never_ends_is_given_up(connect: Connect, dribble: bytes | None) -> None:
    connection = connect(head(900) + b"{")
    start = time.monotonic()
    if dribble:
        connection.settimeout(0.1)
        received = b""
        while not received:
            connection.sendall(dribble)
            try:
                received = connection.recv(65_536)
            except TimeoutError:
                assert time.monotonic() - start < WAIT_SECONDS
        connection.settimeout(10)
    else:
        received = b""
    status, error = answer(received + read_all(connection))
    assert 0.9 < time.monotonic() - start < WAIT_SECONDS
    assert (status, error["error"], error["expected"]) == (408, "TooSlowError", "all of it within 1 seconds")


START = b"POST /get-online-features HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "part", "found"),
    [
        (b"GET /", b"a" * 4096, "bytes"),
        (START + b"X-Long: ", b"a" * 65_536, "bytes"),
        (START, b"X-%s: a\r\n" % (b"n" * 20), "fields"),
        (CHUNKED + b"0\r\nX-Long: ", b"a" * 65_536, "bytes"),
        (CHUNKED + b"0\r\n", b"X: a\r\n" * 100, ""),
        (CHUNKED + b"2;x=", b"a" * 65_536, "bytes"),
    ],
    ids=["url", "field", "fields", "trailer", "trailers", "extension"],
)
def test_a_head_without_an_end_is_refused_before_it_is_kept(
    small: Server, connect: Connect, start: bytes, part: bytes, found: str
) -> None:
    before = resident(small)
    connection, sent = connect(start), 0
    received = b""
    connection.setblocking(False)
    with suppress(BrokenPipeError, ConnectionResetError):
        while sent < 20 << 20:
            try:
                sent += connection.send(part)
            except BlockingIOError:
                time.sleep(0.001)
            with suppress(BlockingIOError):
                received += connection.recv(65_536)
                break
    assert sent < 10 << 20, "what the system keeps for both sides"
    assert resident(small) - before < 50 << 20
    assert small.http.get("/healthz").status_code == 200
    if found and received:
        status, error = answer(received)
        assert (status, error["error"]) == (431, "HeadTooLargeError")
        assert found in error["found"]
        assert "32,768 bytes and 100 fields at most" in error["expected"]


@pytest.mark.parametrize("awaited", [0, 1, 2], ids=["at once", "while the body is awaited", "in parts"])
@pytest.mark.parametrize(
    ("trailers", "found"), [(b"X: a\r\n" * 101, "100 fields"), (b"X: " + b"a" * 400_000, "32,768 bytes")]
)
def test_too_many_trailers_are_refused_by_name(connect: Connect, awaited: int, trailers: bytes, found: str) -> None:
    request = CHUNKED + b"2\r\n{}\r\n0\r\n"
    connection = connect(request if awaited else request + trailers)
    # The last part comes when the answer has been given.
    for part in (trailers, trailers)[:awaited]:
        time.sleep(0.1)
        connection.sendall(part)
    status, error = answer(read_all(connection))
    assert (status, error["error"], error["found"]) == (431, "HeadTooLargeError", f"has more than {found}")


def test_an_answer_is_never_taken_for_that_to_an_earlier_request(connect: Connect) -> None:
    body = json.dumps(ASKED).encode()
    connection = connect(head(len(body)) + body + CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: a\r\n" * 101)
    received = b""
    with suppress(ConnectionResetError):
        received = read_all(connection)
    assert not received.startswith(b"HTTP/1.1 431")


def test_heads_and_trailers_within_the_limits_are_answered(connect: Connect) -> None:
    fields = b"".join(b"X-%d: %s\r\n" % (n, b"a" * 300) for n in range(90))
    body = json.dumps(ASKED).encode()
    for _ in range(2):
        received = connect(CHUNKED[:-2] + fields + b"\r\n%x\r\n%b\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(body), body))
        assert received.recv(65_536).startswith(b"HTTP/1.1 200")
    # A body in many chunks has more bytes around it than a head may have.
    small_chunks = b"".join(b"1;n=%d\r\n%c\r\n" % (10**15 + n, byte) for n, byte in enumerate(body.ljust(990)))
    assert connect(CHUNKED + small_chunks + b"0\r\n\r\n").recv(65_536).startswith(b"HTTP/1.1 200")


def resident(server: Server) -> int:
    """Bytes of the process that are in memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def test_beyond_the_concurrency_there_is_no_queue(small: Server, connect: Connect) -> None:
    under_way = [connect(head(900) + b"{") for _ in range(SMALL.concurrency)]
    # A later connection is answered once the server has read those.
    assert connect(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").recv(65_536).startswith(b"HTTP/1.1 200")
    # Whoever waited for a place would be answered with 200.
    for _ in range(5):
        busy = small.lookup(**ASKED)
        assert (busy.status_code, busy.json()["error"], busy.headers["retry-after"]) == (503, "BusyError", "1")
    assert small.http.get("/healthz").status_code == small.http.get("/readyz").status_code == 200
    under_way[0].close()
    wait(lambda: small.lookup(**ASKED).status_code == 200, "a place that a client has left")
    assert answer(read_all(under_way[1]))[0] == 408
    with ThreadPoolExecutor(SMALL.concurrency) as threads:
        statuses = list(threads.map(lambda _: small.lookup(**ASKED).status_code, range(100)))
    assert statuses == [200] * 100


@pytest.mark.accept
def test_a_key_has_its_share_of_requests(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, limits=Limits(requests_per_second=5)) as server:
        keys = server.grant(one="read:*", other="read:*")

        def ask(name: str) -> Any:
            return server.http.post("/get-online-features", json=ASKED, headers={"Authorization": keys[name]})

        start = time.monotonic()
        answers = []
        while time.monotonic() - start < 2:
            answers.append(ask("one"))
            time.sleep(0.01)
        taken = [answer.status_code for answer in answers].count(200)
        assert 13 <= taken <= 16, "five at once, then five a second"
        (refused,) = {(answer.status_code, answer.headers.get("retry-after")) for answer in answers} - {(200, None)}
        assert refused == (429, "1")
        assert [ask("other").status_code for _ in range(5)] == [200] * 5
        time.sleep(1)
        assert ask("one").status_code == 200


@pytest.mark.accept
def test_a_connection_that_does_not_get_on_is_closed(small: Server, connect: Connect) -> None:
    kept = connect(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert kept.recv(65_536).startswith(b"HTTP/1.1 200")
    dribbling = [kept, connect(b"POST /get-online-features HTTP/1.1\r\nHo"), connect(head(5000))]
    slow = [(connect(b""), b""), *((connection, b"x") for connection in dribbling)]
    kept.sendall(b"GET /heal")
    start = time.monotonic()
    while slow and time.monotonic() - start < WAIT_SECONDS + 2:
        time.sleep(0.2)
        slow = [(connection, sent) for connection, sent in slow if _open(connection, sent)]
        assert len(slow) == 4 or time.monotonic() - start > WAIT_SECONDS - 1
    assert not slow
    assert small.lookup(**ASKED).status_code == 200


def _open(connection: socket.socket, sent: bytes) -> bool:
    """Whether a connection on which something now and then comes in is still open; what was answered is thrown away."""
    connection.setblocking(False)
    try:
        connection.sendall(sent)
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@pytest.mark.accept
@pytest.mark.slowest
def test_an_answer_that_nobody_takes_is_given_up(tmp_path: Path, redis_url: str) -> None:
    contract = contract_of(PUNCTUALITY, view("words", [FLIGHT], [("text", String)]))
    (tmp_path / "contract.json").write_bytes(contract.dumps())
    with connect_redis(redis_url) as client:
        write(OnlineStore(client, contract), contract.view("words"), {"flight": [1]}, [NOW], text=["x" * 10_000])
    body = json.dumps({"features": ["words:text"], "entities": {"flight": [1] * 1_000}}).encode()
    with serving(tmp_path, redis_url) as server, ExitStack() as opened:
        address = ("127.0.0.1", server.http.base_url.port or 0)
        idle, steady = (opened.enter_context(socket.create_connection(address, timeout=10)) for _ in range(2))
        for connection in (idle, steady):
            connection.sendall(head(len(body)) + body)
        # One takes 160 kB a second for a while, and then the rest.
        start, received = time.monotonic(), bytearray(steady.recv(4096))
        length = int(received.partition(b"content-length: ")[2].split(b"\r\n")[0]) + received.index(b"\r\n\r\n") + 4
        assert length > 8 << 20, "more than the system's own buffers take"
        while time.monotonic() - start < 3 * WAIT_SECONDS:
            received += steady.recv(1 << 15)
            time.sleep(0.2)
        while chunk := steady.recv(min(1 << 20, length - len(received))):
            received += chunk
        assert len(received) == length
        taken = 0
        while chunk := idle.recv(1 << 20):  # what the system had taken
            taken += len(chunk)
        assert taken < length


def test_requests_come_no_faster_than_they_are_answered(small: Server, connect: Connect) -> None:
    before = _memory(small)
    connection = connect(b"")
    connection.setblocking(False)
    start, asks = time.monotonic(), (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 50 + b"\r\n") * 100
    sent = 0
    while time.monotonic() - start < 3:
        with suppress(BlockingIOError):
            connection.recv(1 << 20)
        with suppress(BlockingIOError):
            sent += connection.send(asks[sent % len(asks) :])  # on from where the system stopped, in a head perhaps
    assert sent > len(asks)
    assert _memory(small) - before < 60 << 20


def _memory(server: Server) -> int:
    """Resident bytes of a server's process."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()
