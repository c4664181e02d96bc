"""What a server writes of its answers, and what it does where there is no room for that."""

import asyncio
import errno
import fcntl
import json
import os
import shutil
import stat
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.clock import Status
from isthmus.features.contract.schema import Column
from isthmus.features.errors import ConfigurationError
from isthmus.features.online.plan import LookupPlan
from isthmus.features.types import Bytes, String
from isthmus.serving.recorder.batch import ANSWER, PACK, AnswerBatch, AnswerGroup, batches, count, encoded
from isthmus.serving.recorder.columns import (
    TEMPLATES,
    AnswerReader,
    Lookups,
    RecordedAnswer,
    columns_of,
    hashes,
    without_keys,
)
from isthmus.serving.recorder.options import Recording
from isthmus.serving.recorder.recorder import ANSWERS, READERS, Recorder
from isthmus.serving.recorder.spool import Spool, is_complete, segments
from isthmus.serving.settings import ServerSettings
from tests.serving.support import CONTRACT, HOUR, NOW, Server, make_package, serving, wait

SECRET = b"0123456789abcdef"
FEATURES = ["punctuality:late_rate", "punctuality:flights"]


def _recording(folder: Path, redis: str, workers: int = 1, **options: Any) -> AbstractContextManager[Server]:
    return serving(
        folder, redis, record=Recording(**options), spool=str(folder / "spool"),
        spool_key=SECRET.hex(), workers=workers,
    )  # fmt: skip


def _batches(folder: Path) -> list[AnswerBatch]:
    return [batch for path in segments(folder / "spool") for batch in batches(path.read_bytes())]


def _answers(folder: Path) -> int:
    return sum(map(count, _batches(folder)))


def test_an_answer_is_recorded_with_what_it_rested_on(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(tmp_path / "package")
    with _recording(tmp_path, redis_url) as server:
        server.deploy(package)
        wait(lambda: server.http.get("/readyz").json().get("model") == "late", "the model")
        looked_up = server.lookup(features=FEATURES, entities={"carrier": ["UA", "??", "OO"]})
        predicted = server.predict(entities={"carrier": ["UA"]}, request={"distance": [0.5]})
        refused = server.lookup(features=["punctuality:nothing"], entities={"carrier": ["UA"]})
        assert refused.status_code == 404
        assert "isthmus-answer" not in refused.headers
    first, second = (answer.headers["isthmus-answer"].split("-") for answer in (looked_up, predicted))
    assert first[0] == second[0]
    found = {group.route: (batch, group) for batch in _batches(tmp_path) for group in batch.groups}
    batch, group = found["lookup"]
    assert batch.run == first[0]
    (written,) = np.frombuffer(group.answers, ANSWER)
    assert written["sequence"] == int(first[1], 16)
    assert (group.contract, group.package) == (CONTRACT.hash, "")
    assert written["at"] == NOW
    assert 0 < written["seconds"] < 5
    head, tail = group.templates[written["template"]]
    assert json.loads(head + group.requests + tail)["entities"] == {"carrier": ["UA", "??", "OO"]}
    (view,) = group.views
    assert np.frombuffer(view.status, np.uint8).tolist() == [Status.PRESENT, Status.NOT_FOUND, Status.EXPIRED]
    assert np.frombuffer(view.event, np.int64).tolist() == [NOW - HOUR, 0, NOW - 24 * HOUR - 1]
    content = np.frombuffer(view.content, np.int64).tolist()
    assert content[0]
    assert content[1:] == [0, 0]
    batch, group = found["predict"]
    assert group.package == predicted.json()["package"]
    assert np.frombuffer(group.outputs, "<f4").tolist() == predicted.json()["predictions"]
    assert len(group.digest) == 8
    assert "onnxruntime " in batch.runtime


def test_an_answer_without_an_id_of_its_request_has_one_for_the_log_and_the_record(
    tmp_path: Path, redis_url: str
) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    asked = {"features": FEATURES, "entities": {"carrier": ["UA"]}}
    with _recording(tmp_path, redis_url) as server:
        own = server.http.post("/get-online-features", json=asked, headers={"x-request-id": "abc-1"}).headers
        made = server.http.post("/get-online-features", json=asked).headers
        assert own["x-request-id"] == "abc-1" != own["isthmus-answer"]
        assert made["x-request-id"] == made["isthmus-answer"]
        wait(lambda: any(line.get("id") == made["isthmus-answer"] for line in server.lines()), "the line of the log")


BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"[", b'"entities"', b'"entities"[', b'"entities":{"a":[1]}', b'}"entities"]']),
    st.builds(
        lambda before, keys, after: b"{%s\"entities\":{\"k\":[%s]}%s}" % (before, keys, after),
        st.sampled_from([b"", b'"features":["v:f"],']), st.sampled_from([b"", b"1", b"2,3", b'"}"', b'"]"']),
        st.sampled_from([b"", b',"full_feature_names":true', b',"features":["v:f"]']),
    ),
)  # fmt: skip


@given(st.lists(BODIES, min_size=1, max_size=200))
def test_any_body_is_what_its_template_and_its_bytes_are(bodies: list[bytes]) -> None:
    lookups = Lookups(AnswerReader("lookup", "c", "", "", (), {}, plain=True, row=0))
    for start in range(0, len(bodies), 7):
        lookups.add([RecordedAnswer(lookups.reader, 0, body, {}, [], 1) for body in bodies[start : start + 7]], {})
    group, place, found = lookups.group(), 0, []
    for answer in np.frombuffer(group.answers, ANSWER):
        head, tail = group.templates[answer["template"]]
        found.append(head + group.requests[place : place + answer["length"]] + tail)
        place += answer["length"]
    assert found == bodies
    assert len(group.templates) <= TEMPLATES


def test_the_names_of_features_are_written_once() -> None:
    lookups = Lookups(AnswerReader("lookup", "c", "", "", (), {}, plain=True, row=0))
    bodies = [b'{"features":["view:feature"],"entities":{"k":[%d]}}' % n for n in range(10)]
    lookups.add([RecordedAnswer(lookups.reader, 0, body, {}, [], 1) for body in bodies], {})
    assert lookups.group().requests == b"0]1]2]3]4]5]6]7]8]9]"


def test_the_ends_of_requests_count_as_memory() -> None:
    lookups = Lookups(AnswerReader("lookup", "c", "", "", (), {}, plain=True, row=0))
    end = b"x" * 10_000
    bodies = [b'{"entities":{"k":["}%s%d"]}}' % (end, n) for n in (1, 2, 2)]
    sizes = [lookups.add([RecordedAnswer(lookups.reader, 0, body, {}, [], 1)], {}) for body in bodies]
    assert [size > len(end) for size in sizes] == [True, True, False]


def test_columns_of_packed_rows_and_of_others_are_put_together_in_order() -> None:
    dtype = np.dtype([("event", "<i8"), ("known", "<i8"), ("content", "<u8"), ("value", "<f4")])
    packed = np.array([(n, n + 10, n + 20, 0.5) for n in range(4)], dtype)
    times = (packed["content"].tobytes(), packed["event"].tobytes(), packed["known"].tobytes())
    apart = tuple(part[24:] for part in times)
    expected = (*times, bytes(3) + b"\x01")
    assert columns_of(dtype, [packed[:3].tobytes(), (*apart, b"\x01")]) == expected  # type: ignore[list-item]
    assert columns_of(dtype, [packed[:2].tobytes(), packed[2:].tobytes()]) == (*times, bytes(4))


def test_spool_files_are_for_their_owner_alone(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with _recording(tmp_path, redis_url) as server:
        server.lookup(features=FEATURES, entities={"carrier": ["UA"]})
    for path in segments(tmp_path / "spool"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700


def test_keys_of_private_views_are_hashed_wherever_they_stand(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(tmp_path / "package")
    with _recording(tmp_path, redis_url, private=("punctuality",)) as server:
        server.deploy(package)
        wait(lambda: server.http.get("/readyz").json().get("model") == "late", "the model")
        server.lookup(features=FEATURES, entities={"carrier": ["Zaphod", "UA"]}).raise_for_status()
        server.predict(request={"carrier": ["Zaphod"], "distance": [0.5]}).raise_for_status()
        server.predict(entities={"carrier": ["Zaphod"]}, request={"distance": [0.5]}).raise_for_status()
    assert not any(b"Zaphod" in path.read_bytes() for path in segments(tmp_path / "spool"))
    expected = hashes(SECRET, Column("carrier", String), ["Zaphod", "UA"])
    (lookup,) = (group for batch in _batches(tmp_path) for group in batch.groups if group.route == "lookup")
    assert json.loads(lookup.requests)["entities"]["carrier"] == expected
    assert lookup.hashed == ("carrier",)
    assert expected != hashes(SECRET + b"!", Column("carrier", String), ["Zaphod", "UA"])


def test_a_private_key_that_is_a_request_field_alone_is_hashed() -> None:
    private = {"carrier": Column("carrier", String), "chip": Column("chip", Bytes)}
    body = b'{"entities":{"dest":["SAV"]},"request":{"carrier":["Zaphod",null],"chip":["AQI=",null]}}'
    found = json.loads(without_keys(body, {"dest": ["SAV"]}, private, SECRET))
    assert found["entities"] == {"dest": ["SAV"]}
    assert found["request"] == {
        "carrier": hashes(SECRET, private["carrier"], ["Zaphod", None]),
        "chip": hashes(SECRET, private["chip"], [bytes([1, 2]), None]),
    }


def test_several_workers_write_segments_of_their_own(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    ids = set[str]()
    with _recording(tmp_path, redis_url, workers=2) as server:
        for _ in range(300):
            # A connection each, so that both get some.
            answer = server.http.post(
                "/get-online-features", json={"features": FEATURES, "entities": {"carrier": ["UA"]}},
                headers={"connection": "close"},
            )  # fmt: skip
            ids.add(answer.headers["isthmus-answer"])
    assert len(ids) == _answers(tmp_path) == 300
    assert {batch.run for batch in _batches(tmp_path)} == {identity.partition("-")[0] for identity in ids}


def test_a_share_of_the_answers_is_recorded_and_only_those_have_an_id(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with _recording(tmp_path, redis_url, share=0.5) as server:
        answers = [server.lookup(features=FEATURES, entities={"carrier": ["UA"]}) for _ in range(200)]
    assert 60 < sum("isthmus-answer" in answer.headers for answer in answers) == _answers(tmp_path) < 140


def _counted(server: Server, where: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    name = f'isthmus_dropped_answers_total{{where="{where}"}}' if where else "isthmus_recorded_answers_total"
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def test_without_room_answers_go_on_and_dropped_batches_are_counted(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with _recording(tmp_path, redis_url, spool_mb=0.01) as server:
        for _ in range(640):
            server.lookup(features=FEATURES, entities={"carrier": ["UA"]}).raise_for_status()
        wait(lambda: _counted(server, "") + _counted(server, "disk") == 640, "all batches")
        assert _counted(server, "disk") == 640 - _answers(tmp_path) > 0
        assert any(line["event"] == "answers are not recorded" for line in server.lines())


def test_a_folder_that_cannot_be_made_costs_no_answer(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    (tmp_path / "spool").write_bytes(b"a file")
    with _recording(tmp_path, redis_url) as server:
        server.lookup(features=FEATURES, entities={"carrier": ["UA"]}).raise_for_status()
        wait(lambda: _counted(server, "disk") == 1, "the batch to be dropped")


def _batch(number: int) -> bytearray:
    """Ten answers, in about 700 bytes."""
    answers = b"".join(PACK(n, 0, 0.0, 0, 0, 0, 30) for n in range(10))
    group = AnswerGroup("lookup", "", "", "", answers, b"x" * 300, (), b"", 0, b"", (), ((b"", b""),))
    return encoded(AnswerBatch("run", number + 1, 0, 0, "", ("",), (group,)))


def test_the_oldest_segments_make_room_if_that_is_the_policy(tmp_path: Path) -> None:
    former = Spool(tmp_path, 3000, "oldest")
    for number in range(3):
        assert former.write(_batch(number)) == 0
    spool = Spool(tmp_path, 3000, "oldest")
    # Somebody still writes to the oldest segment: this process' own has to go.
    assert [spool.write(_batch(number)) for number in range(3)] == [0, 10, 10]
    former.close()
    assert spool.write(_batch(9)) == 30
    newest = Spool(tmp_path, 1000, "newest")
    with pytest.raises(OSError, match="no room"):
        newest.write(_batch(0))
    assert newest.run not in {path.name.partition("-")[0] for path in segments(tmp_path) if is_complete(path)}


def test_a_write_that_fails_half_way_leaves_no_half_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, 1 << 20, "newest")
    spool.write(encoded(AnswerBatch("run", 1, 0, 0, "", (), ())))
    real, full = os.write, OSError(28, "No space left on device")

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) < 9:
            raise full
        return real(descriptor, data[: len(data) - 8])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            spool.write(encoded(AnswerBatch("run", 2, 0, 0, "", (), ())))
    spool.write(encoded(AnswerBatch("run", 3, 0, 0, "", (), ())))
    (segment,) = segments(tmp_path)
    assert [batch.number for batch in batches(segment.read_bytes())] == [1, 3]


def test_the_oldest_segments_make_room_on_a_disk_that_is_full_of_other_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = _batch(1)
    for _ in range(2):
        spool = Spool(tmp_path, 1 << 20, "oldest")
        spool.write(batch)
        spool.close()
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if sum(path.stat().st_size for path in segments(tmp_path)) >= 2 * len(batch):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        Spool(tmp_path, 1 << 20, "newest").write(batch)
    last = Spool(tmp_path, 1 << 20, "oldest")
    assert [last.write(batch) for _ in range(3)] == [10, 10, 20], "at last its own, of two batches"
    assert sum(path.stat().st_size > 0 for path in segments(tmp_path)) == 1


def test_answers_that_made_room_in_vain_are_counted_with_the_next_batch(tmp_path: Path) -> None:
    batch = _batch(1)
    former, other = Spool(tmp_path, 1 << 20, "oldest"), Spool(tmp_path, 1 << 20, "oldest")
    former.write(batch)
    former.close()
    for _ in range(2):
        other.write(batch)
    spool = Spool(tmp_path, 2 * len(batch), "oldest")
    with pytest.raises(OSError, match="no room"):
        spool.write(batch)
    other.close()
    assert spool.write(batch) == 30


def test_a_folder_that_is_removed_costs_what_was_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, 1 << 20, "newest")
    spool.write(encoded(AnswerBatch("run", 1, 0, 0, "", (), ())))
    shutil.rmtree(folder)
    for number in (2, 3):
        spool.write(encoded(AnswerBatch("run", number, 0, 0, "", (), ())))
    (segment,) = segments(folder)
    assert [batch.number for batch in batches(segment.read_bytes())] == [2, 3]


def test_no_segment_is_seen_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = fcntl.flock, list[bool]()

    def flock(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            # A collector looks at this moment: what it takes for a segment with its end, it removes.
            seen.extend(map(is_complete, segments(tmp_path)))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    spool = Spool(tmp_path, 1 << 20, "newest")
    spool.write(encoded(AnswerBatch("run", 1, 0, 0, "", (), ())))
    assert seen == []
    assert [is_complete(path) for path in segments(tmp_path)] == [False]
    spool.close()


def test_settings_that_record_nowhere_are_refused(tmp_path: Path) -> None:
    def settings(**more: Any) -> ServerSettings:
        return ServerSettings(contract="c", deployment="d", redis="redis://localhost", **more)

    with pytest.raises(ConfigurationError, match="spool: is missing"):
        settings(record=Recording())
    with pytest.raises(ConfigurationError, match="spool_key"):
        settings(record=Recording(private=("v",)), spool=str(tmp_path))


def test_no_more_readers_are_kept_than_the_limit(tmp_path: Path) -> None:
    plans = [LookupPlan(CONTRACT, []) for _ in range(READERS + 1)]
    recorder = Recorder(Recording(), tmp_path, b"", print, print)

    def renewed() -> bool:
        return recorder.reader("lookup", plans[0]) is not first

    try:
        first = recorder.reader("lookup", plans[0])
        for plan in plans[1:READERS]:
            recorder.reader("lookup", plan)
        assert not renewed()
        recorder.reader("lookup", plans[READERS])
        assert renewed()
    finally:
        recorder.close()


def test_batches_are_as_small_as_the_memory(tmp_path: Path) -> None:
    written, dropped = list[int](), list[int]()
    reader = AnswerReader("lookup", "c", "", "", (), {}, plain=True, row=0)

    async def record() -> None:
        recorder = Recorder(Recording(memory_mb=0.1), tmp_path, b"", written.append, lambda _, n: dropped.append(n))
        for number in range(2000):
            answer = RecordedAnswer(reader, number, b"x" * 100, {}, [], 1)
            recorder.identity(answer)
            recorder.add(answer)
            # More than a batch, and less than two.
            while number - sum(written) > 500 and not dropped:
                await asyncio.sleep(0.001)
        await asyncio.to_thread(recorder.close)

    asyncio.run(record())
    assert (sum(written), sum(dropped)) == (2000, 0)


@pytest.mark.parametrize("full", ["newest", "oldest"])
def test_a_slow_disk_drops_whole_batches_by_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    full: Literal["newest", "oldest"],
) -> None:  # fmt: skip
    began, goes_on, written, dropped = threading.Event(), threading.Event(), list[int](), list[tuple[str, int]]()
    real = Spool.write

    def slow(spool: Spool, batch: bytes | bytearray) -> int:
        began.set()
        goes_on.wait()
        return real(spool, batch)

    monkeypatch.setattr(Spool, "write", slow)
    reader = AnswerReader("lookup", "c", "", "", (), {}, plain=True, row=0)

    async def record() -> None:
        # Room for a batch that is written and two that wait.
        options = Recording(memory_mb=3.5 * ANSWERS * (100 + ANSWER.itemsize) / (1 << 20), full=full)
        recorder = Recorder(options, tmp_path, b"", written.append, lambda where, n: dropped.append((where, n)))
        for batch in range(6):
            for _ in range(ANSWERS):
                answer = RecordedAnswer(reader, batch, b"x" * 100, {}, [], 1)
                recorder.identity(answer)
                recorder.add(answer)
            if not batch:
                await asyncio.to_thread(began.wait)
        goes_on.set()
        await asyncio.to_thread(recorder.close)

    asyncio.run(record())
    assert dropped == [("memory", ANSWERS)] * 3
    (line,) = capfd.readouterr().err.splitlines()
    assert "answers are not recorded" in line
    assert "too slow" in line
    assert sum(written) == 3 * ANSWERS
    kept = [batch for path in segments(tmp_path) for batch in batches(path.read_bytes())]
    assert [batch.number for batch in kept] == ([1, 2, 3] if full == "newest" else [1, 5, 6])
