"""`GET /snapshots/SERVICE`: the newest snapshot, whole or as a difference, for whoever may have it."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import httpx
import pyarrow as pa
import pytest

from isthmus.features.snapshot.delta import applied
from isthmus.features.snapshot.file import SnapshotFile, read_snapshot
from isthmus.features.snapshot.shelf import Shelf
from tests.features.snapshot.support import made
from tests.features.snapshot.test_file import ROWS, VIEWS
from tests.serving.support import CONTRACT, Server, serving

PLAIN = {"accept-encoding": "identity"}


def _add(shelf: Shelf, number: int, keep: int = 3) -> SnapshotFile:
    many = {(n,): (n, n, {"n": n * number % 7, "x": n / 3}) for n in range(200)}
    file = made(VIEWS, [many, ROWS[1]], number)
    with shelf.locked():
        shelf.add(file, VIEWS, keep)
    return file


@pytest.fixture
def offered(tmp_path: Path, redis_url: str) -> Iterator[tuple[Server, Shelf]]:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, snapshots=str(tmp_path / "snapshots")) as server:
        yield server, Shelf(tmp_path / "snapshots" / "late")


def test_a_device_gets_the_file_then_differences_then_nothing(offered: tuple[Server, Shelf]) -> None:
    server, shelf = offered
    first = _add(shelf, 1)
    answer = server.http.get("/snapshots/late", headers=PLAIN)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
    assert answer.content == first.data
    assert answer.headers["etag"] == f'"{first.digest}"'
    second = _add(shelf, 2)
    delta = server.http.get("/snapshots/late", params={"since": first.digest}, headers=PLAIN)
    assert applied(first.data, delta.content) == second.data
    assert len(delta.content) < len(second.data)
    for known in ({"params": {"since": second.digest}}, {"headers": {"if-none-match": f'"{second.digest}"'}}):
        assert server.http.get("/snapshots/late", **known).status_code == 304  # type: ignore[arg-type]
    # Of one that is not kept any more, or never was, there is no difference.
    assert server.http.get("/snapshots/late", params={"since": "0" * 64}, headers=PLAIN).content == second.data


def test_whoever_accepts_zstandard_gets_less(offered: tuple[Server, Shelf]) -> None:
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


def test_what_is_not_there_is_named(offered: tuple[Server, Shelf], server: Server) -> None:
    running, shelf = offered
    for http in (running.http, server.http):
        answer = http.get("/snapshots/late")
        assert answer.status_code == 404
        assert "run `isthmus snapshot`" in answer.json()["remedy"]
    unknown = running.http.get("/snapshots/lat")
    assert (unknown.status_code, unknown.json()["found"]) == (404, "no service 'lat' (did you mean late?)")
    for path in ("/snapshots/..%2Flate", "/snapshots/late/x", "/snapshots/", "/snapshots/%00"):
        assert running.http.get(path).status_code == 404
    assert running.http.post("/snapshots/late").status_code == 405
    _add(shelf, 1)
    for since in ("../../contract", "é", "", "x" * 5000):
        assert running.http.get("/snapshots/late", params={"since": since}).status_code == 200
    (shelf.folder / "latest").write_bytes(b"torn")
    assert running.http.get("/snapshots/late").status_code == 503


def test_a_key_needs_the_scope(offered: tuple[Server, Shelf]) -> None:
    server, shelf = offered
    _add(shelf, 1)
    keys = server.grant(phone="snapshot:late", reader="read:*", everything="snapshot:*")
    for name, status in (("phone", 200), ("reader", 403), ("everything", 200)):
        assert server.http.get("/snapshots/late", headers={"authorization": keys[name]}).status_code == status
    assert server.http.get("/snapshots/late").status_code == 401
    other = server.http.get("/snapshots/lat", headers={"authorization": keys["phone"]})
    assert other.status_code == 403


@pytest.mark.accept
def test_while_snapshots_are_written_every_answer_leads_to_a_whole_one(offered: tuple[Server, Shelf]) -> None:
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
        data = applied(data, answer.content) if answer.content.startswith(b"isthdiff") else answer.content
        had, before = read_snapshot(data, VIEWS), had
        assert f'"{had.digest}"' == answer.headers["etag"]
        assert had.header.number > before.header.number
    writer.join()
    assert b"isthdiff" in kinds
