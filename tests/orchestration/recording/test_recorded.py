"""From the spool of servers to the table: every answer once, whatever is killed, cut or of another version."""

import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import msgspec
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from isthmus.dagster import build_definitions
from isthmus.features.clock import now
from isthmus.features.projectstatus import SpoolStatus
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording import collect as collecting
from isthmus.orchestration.recording.collect import CollectedAnswers, collect, damaged_folder, follow
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.server.collect import run_every
from isthmus.orchestration.status import status
from isthmus.serving.recorder.batch import PACK, AnswerBatch, AnswerGroup, StoredViewRows, encoded
from isthmus.serving.recorder.spool import Spool, segments
from tests.orchestration.server.served import served
from tests.orchestration.shop import Open, Shop

DAY = 86_400_000_000
KILLS = int(os.environ.get("TEST_KILLS", "3"))
EVERYTHING = ds.scalar(True)


def _packed(values: Iterable[int], size: int = 8) -> bytes:
    return b"".join(value.to_bytes(size, "little", signed=True) for value in values)


def group(first: int, count: int) -> AnswerGroup:
    """Answers of two rows each, over two views, and a prediction for each row."""
    requests = [b'{"n": %d}' % n for n in range(first, first + count)]
    rows = [8 * first + n for n in range(2 * count)]
    views = tuple(
        StoredViewRows(name, "h" + name, _packed(rows), _packed(rows), _packed(rows), bytes(2 * count))
        for name in ("a", "b")
    )
    answers = b"".join(PACK(first + n, 5, 0.0, 0, 2, n % 2, len(request) - n % 2) for n, request in enumerate(requests))
    # Every other one without its first byte, which its template has.
    written = b"".join(request[n % 2 :] for n, request in enumerate(requests))
    return AnswerGroup(
        "predict", "c0ffee", "d1", "int8/1", answers, written, views, _packed(rows, 4), 1, _packed(rows), ("k",),
        ((b"", b""), (b"{", b"")),
    )  # fmt: skip


def batch(run: str, number: int, count: int = 3, written: int | None = None) -> AnswerBatch:
    at = now() if written is None else written
    return AnswerBatch(run, number, at, 0, "isthmus 1", ("", "backend"), (group(number * 100, count),))


def spooled(project: Project, numbers: list[int], written: int | None = None) -> Spool:
    spool = Spool(project.spool, 1 << 30, "newest")
    for number in numbers:
        spool.write(encoded(batch(spool.run, number, written=written)))
    return spool


@pytest.fixture
def opened(shop: Shop, project: Open) -> Project:
    return project(shop)


def _ids(project: Project) -> list[str]:
    ids: list[str] = RecordedAnswers(project.offline).read(EVERYTHING)["id"].to_pylist()
    return ids


def test_answers_are_in_the_table_as_they_were_given(built: Shop, project: Open) -> None:
    built.append("\n[server.record]\n", "isthmus.toml")
    opened = project(built)
    with served(opened) as http:
        asked = {"features": ["customer_orders:orders_7d", "customer_facts:city"], "entities": {"customer": [0, 1, -5]}}
        answer = http.post("/get-online-features", json=asked)
        identity = answer.headers["isthmus-answer"]
        deadline = time.monotonic() + 20
        while not collect(opened).answers:
            assert time.monotonic() < deadline, "the answer never came"
            time.sleep(0.1)
        assert collect(opened) == CollectedAnswers()
    (row,) = RecordedAnswers(opened.offline).read(ds.field("id") == identity).to_pylist()
    assert row["views"] == ["customer_orders", "customer_facts"]
    assert (row["rows"], len(row["status"]), len(row["content"])) == (3, 6, 6)
    assert [bool(content) for content in row["content"]][2::3] == [False, False]
    assert row["contract"] == opened.applied().hash
    assert (opened.recorded / "contracts" / f"{row['contract']}.json").exists()
    assert collect(opened) == CollectedAnswers()
    assert segments(opened.spool) == [], "the server has ended, and all of it is in the table"


@pytest.mark.parametrize("earlier", [False, True])
def test_recorded_answers_are_for_their_owner_alone(opened: Project, earlier: bool) -> None:
    folders = [opened.spool, Path(RecordedAnswers(opened.offline).path), damaged_folder(opened)]
    before = os.umask(0)
    try:
        for folder in folders if earlier else ():
            # As an earlier release, or a careless copy, has left them.
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        spooled(opened, [1, 2]).close()
        segments(opened.spool)[0].write_bytes(segments(opened.spool)[0].read_bytes()[:-3])
        collect(opened)
    finally:
        os.umask(before)
    assert len(_ids(opened)) == 3
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3


def test_columns_of_several_views_are_put_together_by_answer(opened: Project) -> None:
    spooled(opened, [1]).close()
    assert collect(opened) == CollectedAnswers(answers=3)
    rows = RecordedAnswers(opened.offline).read(EVERYTHING).to_pylist()
    assert [row["request"] for row in rows] == ['{"n": 100}', '{"n": 101}', '{"n": 102}']
    assert [row["content"] for row in rows] == [[800 + n, 801 + n, 800 + n, 801 + n] for n in (0, 2, 4)]
    assert [row["digest"] for row in rows] == [[800 + n, 801 + n] for n in (0, 2, 4)]
    assert rows[0]["hashed"] == ["k"]


def test_a_segment_stays_as_long_as_its_server_writes_and_is_read_again(opened: Project) -> None:
    spool = spooled(opened, [1, 2])
    assert collect(opened) == CollectedAnswers(answers=6)
    assert len(segments(opened.spool)) == 1
    spool.write(encoded(batch(spool.run, 3)))
    assert collect(opened) == CollectedAnswers(answers=3)
    spool.close()
    assert collect(opened) == CollectedAnswers()
    assert segments(opened.spool) == []
    assert len(set(_ids(opened))) == len(_ids(opened)) == 9


def test_what_waits_is_known_without_reading_it(shop: Shop, project: Open) -> None:
    def found(opened: Project) -> SpoolStatus:
        spool = status(opened, measure=False).spool
        assert spool is not None
        return spool

    assert status(project(shop), measure=False).spool is None
    shop.append("\n[server.record]\n", "isthmus.toml")
    opened, began = project(shop), now()
    assert found(opened) == SpoolStatus(bytes=0, since=None)
    spool = spooled(opened, [1])
    (segment,) = segments(opened.spool)
    os.utime(segment, (began / 1e6 - 60, began / 1e6 - 60))
    before = found(opened)
    assert before.since is not None
    assert (before.bytes, abs(before.since - (began - 60_000_000)) < 1000) == (segment.stat().st_size, True)
    assert "Recorded answers wait since" in str([*status(opened, measure=False).blocks()])
    collect(opened)
    # Its server lives, and may write more.
    assert (found(opened).since, found(opened).bytes) == (None, before.bytes)
    spool.write(encoded(batch(spool.run, 2)))
    assert (found(opened).since or 0) >= began
    spool.close()


def test_dropped_batches_are_missing_and_counted(opened: Project) -> None:
    spooled(opened, [1, 2, 5, 9]).close()
    assert collect(opened) == CollectedAnswers(answers=12, missing=5)


def test_a_batch_cut_in_half_is_put_aside_after_those_before_it(opened: Project) -> None:
    spooled(opened, [1, 2]).close()
    (segment,) = segments(opened.spool)
    os.truncate(segment, segment.stat().st_size - 20)
    counts = collect(opened)
    assert (counts.answers, len(counts.problems)) == (3, 1)
    assert "bytes into a batch of" in counts.problems[0]
    assert [path.name for path in damaged_folder(opened).iterdir()] == [segment.name]
    assert collect(opened) == CollectedAnswers()


@pytest.mark.parametrize(
    "changes", [{"requests": b"{"}, {"templates": ()}, {"digest": b"12345678"}, {"outputs": b""}, {"views": ()}]
)
def test_a_batch_whose_columns_do_not_fit_is_put_aside(opened: Project, changes: dict[str, Any]) -> None:
    spool = spooled(opened, [1])
    whole = batch(spool.run, 2)
    view = msgspec.structs.replace(whole.groups[0].views[0], content=b"abc")
    other = msgspec.structs.replace(whole.groups[0], **({"views": (view,)} if "views" in changes else changes))
    spool.write(encoded(msgspec.structs.replace(whole, groups=(other,))))
    spool.close()
    counts = collect(opened)
    assert (counts.answers, len(counts.problems)) == (3, 1)
    assert "whose length differs from the number of answers" in counts.problems[0]
    assert len([*damaged_folder(opened).iterdir()]) == 1
    assert collect(opened) == CollectedAnswers()


def test_the_batch_that_is_being_written_waits_for_the_next_run(opened: Project) -> None:
    spool = spooled(opened, [1, 2])
    (segment,) = segments(opened.spool)
    whole = segment.read_bytes()
    os.truncate(segment, len(whole) - 20)
    assert collect(opened) == CollectedAnswers(answers=3)
    segment.write_bytes(whole)
    assert collect(opened) == CollectedAnswers(answers=3)
    spool.close()


def test_a_batch_of_another_version_is_left_for_that_version(opened: Project) -> None:
    spooled(opened, [1, 2]).close()
    (segment,) = segments(opened.spool)
    content = bytearray(segment.read_bytes())
    content[content.index(b"ISRB", 5) + 4] = 7
    segment.write_bytes(content)
    counts = collect(opened)
    assert counts.answers == 3
    assert "version 7" in counts.problems[0]
    assert segments(opened.spool) == [segment]
    assert collect(opened).answers == 0


def test_answers_of_a_server_whose_clock_went_back_are_all_there(opened: Project) -> None:
    spool = Spool(opened.spool, 1 << 30, "newest")
    for number, written in ((1, now()), (2, now() - 2 * DAY), (3, now() - DAY)):
        spool.write(encoded(batch(spool.run, number, written=written)))
    spool.close()
    assert collect(opened) == CollectedAnswers(answers=9)
    assert len(set(_ids(opened))) == 9


def test_answers_stay_as_long_as_the_settings_say(
    opened: Project, shop: Shop, project: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooled(opened, [1], written=now() - 5 * DAY).close()
    spooled(opened, [1]).close()
    shop.append("\n[server.record]\nkeep_days = 2\n", "isthmus.toml")
    kept = project(shop)
    assert collect(kept) == CollectedAnswers(answers=6)
    assert len(_ids(kept)) == 3
    assert collect(kept) == CollectedAnswers()
    files = [*Path(RecordedAnswers(kept.offline).path).glob("day=*/*")]
    assert len(files) == 2, "whoever reads them now can go on"
    # A day later, whether anything is recorded meanwhile or not.
    monkeypatch.setattr("isthmus.orchestration.recording.table.HOURS", 0)
    assert collect(kept) == CollectedAnswers()
    assert sum(file.exists() for file in files) == 1


@pytest.mark.parametrize("days", ["inf", "1e9"])
def test_answers_may_stay_for_ever(opened: Project, shop: Shop, project: Open, days: str) -> None:
    spooled(opened, [1], written=now() - 5 * DAY).close()
    shop.append(f"\n[server.record]\nkeep_days = {days}\n", "isthmus.toml")
    assert collect(project(shop)) == CollectedAnswers(answers=3)
    assert len(_ids(opened)) == 3


def test_days_with_many_files_are_joined(opened: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.orchestration.recording.table.FILES", 4)
    spool = Spool(opened.spool, 1 << 30, "newest")
    at = now()
    for number in range(1, 7):
        spool.write(encoded(batch(spool.run, number, written=at)))
        assert collect(opened) == CollectedAnswers(answers=3)
    spool.close()
    assert len(DeltaTable(RecordedAnswers(opened.offline).path).file_uris()) < 6
    assert len(set(_ids(opened))) == len(_ids(opened)) == 18
    assert collect(opened) == CollectedAnswers(), "the last batch of the server is known all the same"


def test_no_file_of_a_folder_is_opened_by_python(opened: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python has opened is given back to it when a scan is over, and aborts an interpreter that ends just then."""
    spooled(opened, [1]).close()
    collect(opened)
    monkeypatch.delattr("deltalake.fs.DeltaStorageHandler.open_input_file")
    assert len(_ids(opened)) == 3


def test_a_commit_has_so_many_bytes(opened: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    spooled(opened, [1, 2, 3]).close()
    monkeypatch.setattr(collecting, "BYTES", 1)
    assert collect(opened) == CollectedAnswers(answers=9)
    assert DeltaTable(RecordedAnswers(opened.offline).path).version() == 2


def test_following_says_a_problem_once(opened: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, said, turns = threading.Event(), list[str](), iter(range(3))

    def collected(_: Project) -> CollectedAnswers:
        if next(turns) == 2:
            stopped.set()
        return CollectedAnswers(problems=("half a batch",))

    monkeypatch.setattr(collecting, "collect", collected)
    waits: list[float] = []
    monkeypatch.setattr(stopped, "wait", waits.append)
    follow(opened, said.append, stopped)
    assert said == ["half a batch"]
    assert [round(wait) for wait in waits] == [60, 60, 60]


RUN = """
import sys
from pathlib import Path
from isthmus.orchestration.server.collect import run_every
from isthmus.dagster import build_definitions
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
project = Project(Path(sys.argv[1]))
sys.stdout.write("ready\\n")
sys.stdout.flush()
collect(project, lot=6)
"""


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_killed_at_any_moment(opened: Project) -> None:
    chance = random.Random(3)
    expected, number = 0, 0
    spool = Spool(opened.spool, 1 << 30, "newest")
    for kill in range(KILLS):
        for _ in range(8):
            number += 1
            spool.write(encoded(batch(spool.run, number)))
            expected += 3
        if kill % 2:
            spool.close()
        with subprocess.Popen([sys.executable, "-c", RUN, str(opened.root)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0, 0.25))
            child.kill()
    spool.close()
    assert collect(opened).missing == 0
    assert len(set(_ids(opened))) == len(_ids(opened)) == expected
    assert segments(opened.spool) == []


def test_two_that_collect_at_the_same_moment_have_each_answer_once(opened: Project) -> None:
    spool = spooled(opened, [*range(1, 20)])
    with ThreadPoolExecutor() as threads:
        counts = [*threads.map(lambda _: collect(opened, lot=6), range(4))]
    assert sorted(count.answers for count in counts) == [0, 0, 0, 57]
    assert len(set(_ids(opened))) == len(_ids(opened)) == 57
    spool.close()


@pytest.mark.accept
def test_recorded_answers_are_an_asset_that_is_collected_every_hour(shop: Shop, project: Open, tmp_path: Path) -> None:
    key = dg.AssetKey("recorded")
    assert key not in build_definitions(shop.root).resolve_asset_graph().get_all_asset_keys()
    shop.append("\n[server.record]\n", "isthmus.toml")
    opened = project(shop)
    spooled(opened, [1, 2, 4]).close()
    cut = spooled(opened, [1])
    cut.close()
    (last,) = (path for path in segments(opened.spool) if path.name.startswith(cut.run))
    last.write_bytes(last.read_bytes()[:-1])
    definitions = dg.Definitions.merge(
        build_definitions(shop.root),
        dg.Definitions(jobs=[dg.define_asset_job("chosen", dg.AssetSelection.assets(key))]),
    )

    def asked(
        at: datetime, before: dg.EvaluateAutomationConditionsResult | None
    ) -> dg.EvaluateAutomationConditionsResult:
        return dg.evaluate_automation_conditions(
            definitions, instance, dg.AssetSelection.all(), evaluation_time=at,
            cursor=None if before is None else before.cursor,
        )  # fmt: skip

    noon = datetime(2030, 6, 1, 12, 30, tzinfo=UTC)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        before = asked(noon, None)
        before = asked(noon + timedelta(hours=1), before)
        assert before.get_num_requested(key) == 0, "nobody has collected any yet"
        result = definitions.resolve_job_def("chosen").execute_in_process(instance=instance)
        (made,) = result.get_asset_materialization_events()
        metadata = made.materialization.metadata
        shown = {name: metadata[name].value for name in ("dagster/row_count", "answers", "missing", "damaged")}
        assert shown == {"dagster/row_count": 9, "answers": 9, "missing": 1, "damaged": 1}
        assert "complete batches are in the table" in str(metadata["problems"].value)
        before = asked(noon + timedelta(hours=1, minutes=10), before)
        assert before.get_num_requested(key) == 0
        assert asked(noon + timedelta(hours=2), before).get_num_requested(key) == 1
    assert collect(opened) == CollectedAnswers()


def test_a_batch_with_a_wrong_inside_keeps_no_other_waiting_and_can_be_put_back(opened: Project) -> None:
    spool = spooled(opened, [1, 2])
    wrong = msgspec.structs.replace(batch(spool.run, 3).groups[0], requests=b"\xff" * 33)
    for written in (msgspec.structs.replace(batch(spool.run, 3), groups=(wrong,)), batch("another", 3)):
        spool.write(encoded(written))
    for number in (4, 5):
        spool.write(encoded(batch(spool.run, number)))
    spool.close()
    spooled(opened, [1]).close()
    counts = collect(opened)
    assert (counts.answers, counts.missing, len(counts.problems)) == (15, 1, 2)
    assert all("recorded/damaged" in problem for problem in counts.problems)
    assert collect(opened) == CollectedAnswers()
    # Mended, and put back under the name that the problem has.
    (aside,) = damaged_folder(opened).iterdir()
    name = counts.problems[0].rpartition("recorded/spool as ")[2]
    aside.rename(opened.spool / name)
    (opened.spool / name).write_bytes(b"".join(encoded(batch(spool.run, number)) for number in range(1, 6)))
    spooled(opened, [1]).close()
    assert collect(opened) == CollectedAnswers(answers=6)
    assert len(set(_ids(opened))) == len(_ids(opened)) == 21
    assert RecordedAnswers(opened.offline).last_batches([spool.run]) == {spool.run: 5}
    assert segments(opened.spool) == []


def test_a_batch_with_a_wrong_inside_is_not_forgotten_while_its_server_goes_on(opened: Project) -> None:
    spool = spooled(opened, [1])
    group = batch(spool.run, 2).groups[0]
    wrong = msgspec.structs.replace(group, requests=b"\xff" * len(group.requests))
    spool.write(encoded(msgspec.structs.replace(batch(spool.run, 2), groups=(wrong,))))
    spool.write(encoded(batch(spool.run, 3)))
    assert collect(opened).answers == 6
    spool.close()
    content = segments(opened.spool)[0].read_bytes()
    assert len(collect(opened).problems) == 1
    assert [path.read_bytes() for path in damaged_folder(opened).iterdir()] == [content]
    assert collect(opened) == CollectedAnswers()


@pytest.mark.accept
def test_killed_while_it_sets_a_segment_aside(opened: Project) -> None:
    spool = spooled(opened, [1])
    spool.write(encoded(batch("another", 2)))
    spool.write(encoded(batch(spool.run, 3)))
    spool.close()
    (segment,) = segments(opened.spool)
    content = segment.read_bytes()
    # Ended by SIGKILL before and after the file has moved.
    for when in ("before", "after"):
        program = (
            "import os, signal, sys\nfrom pathlib import Path\nfrom isthmus.orchestration.project import Project\n"
            "from isthmus.orchestration.recording.collect import collect\nrename = Path.rename\n"
            f"def killed(path, target):\n    if {when == 'after'}: rename(path, target)\n"
            "    if 'damaged' in str(target): os.kill(os.getpid(), signal.SIGKILL)\n"
            "    return rename(path, target)\nPath.rename = killed\ncollect(Project(Path(sys.argv[1])))"
        )
        ended = subprocess.run([sys.executable, "-c", program, str(opened.root)], check=False)
        assert ended.returncode == -9
        found = [*segments(opened.spool), *damaged_folder(opened).iterdir()]
        assert [path.read_bytes() for path in found] == [content]
        assert len(set(_ids(opened))) == len(_ids(opened)) == 6
    assert collect(opened) == CollectedAnswers()


class _Stop(BaseException):
    """As Ctrl-C."""


def test_what_repeats_goes_on_after_any_exception_and_ends_when_it_is_told() -> None:
    said: list[str] = []
    raised = iter([OverflowError("int too big"), KeyError("k"), KeyError("k"), RecursionError("deep"), None, _Stop()])

    def turn() -> str:
        error = next(raised)
        if error is not None:
            raise error
        return ""

    with pytest.raises(_Stop):
        run_every(turn, 0, said.append)
    assert [text.partition(" at ")[0] for text in said] == ["OverflowError", "KeyError", "RecursionError"]
    assert all("turn:" in text for text in said), "a place to begin to look at"
