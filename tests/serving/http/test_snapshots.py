"""`GET /snapshots/SERVICE`: the newest snapshot, whole or as a difference, for whoever may have it."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from urllib.parse import quote

import httpx
import pyarrow as pa
import pytest

from isthmus.features.contract.schema import Column
from isthmus.features.types import Int64, String
from isthmus.package.snapshot.delta import apply_delta
from isthmus.package.snapshot.file import SnapshotFile, read_header, read_snapshot
from isthmus.package.snapshot.store import SnapshotFolder
from tests.package.snapshot.support import made, put_owners
from tests.package.snapshot.test_file import ROWS, VIEWS
from tests.serving.support import CONTRACT, Server, serving

PLAIN = {"accept-encoding": "identity"}


def _add(shelf: SnapshotFolder, number: int, keep: int = 3) -> SnapshotFile:
    many = {(n,): (n, n, {"n": n * number % 7, "x": n / 3}) for n in range(200)}
    file = made(VIEWS, [many, ROWS[1]], number)
    with shelf.locked():
        shelf.add(file, VIEWS, keep)
    return file


@pytest.fixture
def offered(tmp_path: Path, redis_url: str) -> Iterator[tuple[Server, SnapshotFolder]]:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, snapshots=str(tmp_path / "snapshots")) as server:
        yield server, SnapshotFolder(tmp_path / "snapshots" / "late")


def test_a_device_gets_the_file_then_differences_then_nothing(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    first = _add(shelf, 1)
    answer = server.http.get("/snapshots/late", headers=PLAIN)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
    assert answer.content == first.data
    assert answer.headers["etag"] == f'"{first.digest}"'
    second = _add(shelf, 2)
    delta = server.http.get("/snapshots/late", params={"since": first.digest}, headers=PLAIN)
    assert apply_delta(first.data, delta.content) == second.data
    assert len(delta.content) < len(second.data)
    for known in ({"params": {"since": second.digest}}, {"headers": {"if-none-match": f'"{second.digest}"'}}):
        assert server.http.get("/snapshots/late", **known).status_code == 304  # type: ignore[arg-type]
    # Of one that is not kept any more, or never was, there is no difference.
    assert server.http.get("/snapshots/late", params={"since": "0" * 64}, headers=PLAIN).content == second.data


def test_whoever_accepts_zstandard_gets_less(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    file = _add(shelf, 1)
    url, accepted = f"{server.http.base_url}/snapshots/late", {"accept-encoding": "gzip, zstd"}
    with httpx.stream("GET", url, headers=accepted) as answer:
        raw = b"".join(answer.iter_raw())
    assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("zstd", "accept-encoding")
    assert len(raw) < len(file.data)
    assert pa.decompress(raw, len(file.data), codec="zstd", asbytes=True) == file.data
    with httpx.stream("GET", url, headers={"accept-encoding": "gzip, zstd;q=0"}) as answer:
        assert b"".join(answer.iter_raw()) == file.data


def test_what_is_not_there_is_named(offered: tuple[Server, SnapshotFolder], server: Server) -> None:
    running, shelf = offered
    for http in (running.http, server.http):
        answer = http.get("/snapshots/late")
        assert answer.status_code == 404
        assert "run `isthmus features snapshot`" in answer.json()["remedy"]
    unknown = running.http.get("/snapshots/lat")
    assert (unknown.status_code, unknown.json()["found"]) == (404, "no service 'lat' (did you mean late?)")
    for path in ("/snapshots/..%2Flate", "/snapshots/late/x", "/snapshots/", "/snapshots/%00", "/snapshots//7"):
        assert running.http.get(path).status_code == 404
    assert running.http.post("/snapshots/late").status_code == 405
    _add(shelf, 1)
    for since in ("../../contract", "é", "", "x" * 5000):
        assert running.http.get("/snapshots/late", params={"since": since}).status_code == 200
    (shelf.folder / "latest").write_bytes(b"torn")
    assert running.http.get("/snapshots/late").status_code == 503


def test_a_key_needs_the_scope(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    _add(shelf, 1)
    keys = server.grant(phone="snapshot:late", reader="read:*", everything="snapshot:*")
    for name, status in (("phone", 200), ("reader", 403), ("everything", 200)):
        assert server.http.get("/snapshots/late", headers={"authorization": keys[name]}).status_code == status
    assert server.http.get("/snapshots/late").status_code == 401
    other = server.http.get("/snapshots/lat", headers={"authorization": keys["phone"]})
    assert other.status_code == 403


K, PLACE = Column("k", Int64), Column("place", String)


def _add_owners(shelf: SnapshotFolder, number: int, owner: Column = K) -> None:
    many = {(n,): (n, n, {"n": n * number % 7, "x": n / 3}) for n in range(50)}
    places = {**ROWS[1], ("a/b %ü",): (1, 1, {"text": "x", "n": number})}
    put_owners(shelf, VIEWS, [many, places], owner, number)


def test_an_owner_gets_the_file_then_differences_then_nothing(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    _add_owners(shelf, 1)
    first = server.http.get("/snapshots/late/7", headers=PLAIN)
    assert (first.status_code, first.headers["cache-control"]) == (200, "private, no-cache")
    assert read_header(first.content, "")[0].owner == ("k", "7")
    assert [*read_snapshot(first.content, VIEWS).rows["one"]] == [b"i\7" + bytes(7)]
    _add_owners(shelf, 2)
    known = first.headers["etag"].strip('"')
    whole = server.http.get("/snapshots/late/7", headers=PLAIN)
    delta = server.http.get("/snapshots/late/7", params={"since": known}, headers=PLAIN)
    assert delta.content[:8] == b"isthdiff"
    assert delta.headers["etag"] == whole.headers["etag"] != first.headers["etag"]
    assert apply_delta(first.content, delta.content) == whole.content
    newest = whole.headers["etag"].strip('"')
    for same in ({"params": {"since": newest}}, {"headers": {"if-none-match": f'"{newest}"'}}):
        answer = server.http.get("/snapshots/late/7", **same)  # type: ignore[arg-type]
        assert (answer.status_code, answer.content) == (304, b"")
    # What another owner has leads nowhere from here.
    assert server.http.get("/snapshots/late/8", params={"since": newest}, headers=PLAIN).content[:8] == b"isthsnap"
    packed = server.http.get("/snapshots/late/7", headers={"accept-encoding": "zstd"})
    assert packed.headers["content-encoding"] == "zstd"


@pytest.mark.parametrize("place", [-1, 40])
def test_a_shared_snapshot_that_is_not_what_its_name_says_is_not_served(
    offered: tuple[Server, SnapshotFolder], place: int
) -> None:
    server, shelf = offered
    digest = _add(shelf, 1).digest
    assert server.http.get("/snapshots/late", headers=PLAIN).status_code == 200
    data = bytearray(shelf.path(digest).read_bytes())
    data[place] ^= 1
    shelf.path(digest).write_bytes(data)
    refused = server.http.get("/snapshots/late", headers=PLAIN)
    assert (refused.status_code, refused.json()["found"]) == (503, "is damaged: its SHA-256 differs")
    assert refused.json()["remedy"] == "run `isthmus features snapshot`"
    assert str(shelf.folder) not in refused.text


def test_a_text_is_an_owner_in_percent_encoding(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    _add_owners(shelf, 1, PLACE)
    answer = server.http.get(f"/snapshots/late/{quote('a/b %ü', safe='')}", headers=PLAIN)
    assert read_header(answer.content, "")[0].owner == ("place", "a/b %ü")
    assert [*read_snapshot(answer.content, VIEWS).rows["two"]] == [b"s\7\0\0\0" + "a/b %ü".encode()]
    assert server.http.get("/snapshots/late/JF").status_code == 404


def test_a_line_break_is_part_of_the_owner(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    texts = ("7", "7\n", "\n7", "a\r\nb")
    put_owners(shelf, VIEWS, [ROWS[0], {(text,): (1, 1, {"text": "x", "n": 1}) for text in texts}], PLACE)
    for text in texts:
        answer = server.http.get(f"/snapshots/late/{quote(text, safe='')}", headers=PLAIN)
        assert answer.status_code == 200, text
        assert read_header(answer.content, "")[0].owner == ("place", text)
    assert server.http.get("/snapshots/late/a%0A").status_code == 404
    _add_owners(shelf, 2)
    assert server.http.get("/snapshots/late/7%0A").status_code == 422
    logged = {line["path"] for line in server.lines() if line.get("path", "").startswith("/snapshots")}
    assert logged == {"/snapshots/{service}/{value:owner}"}


def test_whose_snapshot_is_not_there_is_named(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    _add_owners(shelf, 1)

    def refused(path: str, status: int) -> dict[str, str]:
        answer = server.http.get(path)
        assert answer.status_code == status, answer.text
        assert answer.headers["cache-control"] == "no-store"
        problem: dict[str, str] = answer.json()
        return problem

    whole = refused("/snapshots/late", 404)
    assert whole["found"] == "differs by k"
    assert whole["remedy"] == "request /snapshots/late/K, with the value of the device's own k"
    assert refused("/snapshots/late/50", 404)["found"] == "does not exist for k 50"
    for wrong in ("x", "7.0", "07", str(2**63), "7/8", "%20", ""):
        problem = refused(f"/snapshots/late/{wrong}", 422)
        assert "is not a valid k" in problem["found"]
        assert problem["expected"].startswith("a Int64 as in JSON, without quotes")
    assert "did you mean late" in refused("/snapshots/lat/7", 404)["found"]
    _add(shelf, 2)
    for_all = refused("/snapshots/late/7", 404)
    assert (for_all["found"], for_all["remedy"]) == ("is the same for all devices", "request /snapshots/late")
    _add_owners(shelf, 3)
    (file,) = shelf.folder.glob("*.owners")
    file.write_bytes(file.read_bytes()[:4000])
    assert "isthmus features snapshot" in refused("/snapshots/late/7", 503)["remedy"]


def test_a_key_of_an_owner_opens_its_snapshot_alone(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    _add_owners(shelf, 1)
    keys = server.grant(
        seven="snapshot:late/7", encoded="snapshot:late/a%20b", service="snapshot:late", everything="snapshot:*",
        other="snapshot:lat/7", reader="read:* push:* predict:*",
    )  # fmt: skip
    expected = {
        "/snapshots/late/7": {"seven", "service", "everything"},
        "/snapshots/late/8": {"service", "everything"},
        # Whether there is such an owner is nobody else's business.
        "/snapshots/late/70": {"service", "everything"},
        "/snapshots/late/a%20b": {"encoded", "service", "everything"},
        "/snapshots/late": {"service", "everything"},
    }
    for path, open_to in expected.items():
        for name, key in keys.items():
            answer = server.http.get(path, headers={"authorization": key})
            assert (answer.status_code != 403) == (name in open_to), (path, name)
        assert server.http.get(path).status_code == 401
    answer = server.http.get("/snapshots/late/8", headers={"authorization": keys["seven"]})
    assert answer.json()["found"] == "lacks the scope snapshot:late/8"


def test_the_log_does_not_say_whose_snapshot_was_asked_for(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    _add_owners(shelf, 1)
    server.http.get("/snapshots/late/7777777")
    server.http.get("/snapshots/late")
    logged = [line["path"] for line in server.lines() if line.get("path", "").startswith("/snapshots")]
    assert logged[-2:] == ["/snapshots/{service}/{value:owner}", "/snapshots/{service}"]
    with socket.create_connection((server.http.base_url.host, server.http.base_url.port or 0), timeout=10) as raw:
        for path in (
            "//snapshots/late/7777777", "/snapshots//late/7777777", "/snapshots/late//7777777",
            "/Snapshots/late/7777777", "/snapshots%2Flate%2F7777777", "/snapshots;v=1/late/7777777",
            "/snapshots/late;7777777", "/v2/models/7777777", "/./snapshots/late/7777777", "/7777777/ready",
            "/x/../snapshots/late/7777777", "/snapshots/7777777", "/snapshots/late?o=7777777",
            "http://localhost/snapshots/late/7777777",
        ):  # fmt: skip
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert raw.recv(1 << 16)[9:10] in b"45"
    handshake = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    assert server.http.get("//snapshots/late/7777777", headers=handshake).status_code == 404
    assert server.http.post("/snapshots/late/7777777").status_code == 405
    assert "7777777" not in json.dumps(server.lines())
    assert "7777777" not in server.http.get("/metrics").text


@pytest.mark.accept
def test_while_owners_are_written_every_answer_leads_to_a_whole_one(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    _add_owners(shelf, 1)
    first = server.http.get("/snapshots/late/7", headers=PLAIN)
    data, digest, kinds, ended = first.content, first.headers["etag"].strip('"'), set(), Event()

    def write() -> None:
        for number in range(2, 100):
            _add_owners(shelf, number)
        ended.set()

    writer = Thread(target=write)
    writer.start()
    while not ended.is_set():
        answer = server.http.get("/snapshots/late/7", params={"since": digest}, headers=PLAIN)
        if answer.status_code == 304:
            continue
        assert answer.status_code == 200
        kinds.add(answer.content[:8])
        data = apply_delta(data, answer.content) if answer.content.startswith(b"isthdiff") else answer.content
        assert f'"{read_snapshot(data, VIEWS).digest}"' == answer.headers["etag"]
        digest = answer.headers["etag"].strip('"')
    writer.join()
    assert b"isthdiff" in kinds


@pytest.mark.accept
def test_while_snapshots_are_written_every_answer_leads_to_a_whole_one(offered: tuple[Server, SnapshotFolder]) -> None:
    server, shelf = offered
    had, ended = _add(shelf, 1), Event()

    def write() -> None:
        for number in range(2, 200):
            _add(shelf, number, keep=2)
        ended.set()

    writer = Thread(target=write)
    writer.start()
    data, kinds = had.data, set()
    while not ended.is_set():
        answer = server.http.get("/snapshots/late", params={"since": had.digest}, headers=PLAIN)
        if answer.status_code == 304:
            continue
        assert answer.status_code == 200
        kinds.add(answer.content[:8])
        data = apply_delta(data, answer.content) if answer.content.startswith(b"isthdiff") else answer.content
        had, before = read_snapshot(data, VIEWS), had
        assert f'"{had.digest}"' == answer.headers["etag"]
        assert had.header.number > before.header.number
    writer.join()
    assert b"isthdiff" in kinds
