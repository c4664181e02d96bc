"""Recorded answers computed again: all the same where nothing was disturbed, and a cause where something was."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from isthmus.features import clock
from isthmus.features.errors import DataError, GateFailed, PackageError, RequestError
from isthmus.features.offline.store import OfflineStore
from isthmus.features.profiles import ServingProfile
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import Float64, Int64
from isthmus.orchestration.attribution.explain import explain
from isthmus.orchestration.maintenance.maintain import maintain
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.recording.replay import Replay, replay, require_same
from isthmus.orchestration.recording.served import Cause, Group, ServedAnswers, predict_all
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.server.collect import collect as collect_pushes
from isthmus.orchestration.verification.verify import verify
from isthmus.package.manifest import open_package, package_digest
from isthmus.serving.deployment.cache import folder_of
from isthmus.serving.deployment.record import unverified_deployment
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.recorder.batch import ANSWER, AnswerGroup, batches, encoded
from isthmus.serving.recorder.options import Recording
from isthmus.serving.recorder.spool import segments
from tests import commandline
from tests.orchestration.server.served import served
from tests.orchestration.server.test_collect import VIEW, pushed
from tests.orchestration.shop import Open, Shop
from tests.serving.http.test_inference import INFER, put
from tests.serving.support import CONTRACT, NOW, make_package, serving
from tests.serving.tensors import as_binary, as_json, frames, make_drawing_package

MINUTE = 60_000_000
DAY = 24 * 60 * MINUTE
CUSTOMER = ["customer_orders:orders_7d", "customer_orders:late_rate_7d", "customer_facts:city"]
SHELF = ["shelf_demand:sold_1d"]

Alter = Callable[[AnswerGroup], AnswerGroup]


def customers(project: Project) -> list[int]:
    """Some that have fresh rows, and rows of long before."""
    rows = OfflineStore(project.offline).history(project.applied().views[VIEW]).table()
    times = rows.group_by("customer").aggregate(
        [("event_timestamp", "max"), ("event_timestamp", "min"), ("known_at", "max")]
    )
    now = project.now()
    first, last, known = (
        times[name].cast(pa.int64()).to_numpy()
        for name in ("event_timestamp_min", "event_timestamp_max", "known_at_max")
    )
    places = np.flatnonzero((first < now - 20 * DAY) & (last > now - 5 * DAY) & (known < now - 3 * MINUTE))
    found: list[int] = times["customer"].to_numpy()[places].tolist()
    assert len(found) > 3
    return sorted(found)


def looked_up(http: httpx.Client, customers: list[int]) -> str:
    body = {"features": CUSTOMER, "entities": {"customer": customers}}
    answer = http.post("/get-online-features", json=body)
    assert answer.status_code == 200, answer.text
    identity: str = answer.headers["isthmus-answer"]
    return identity


def predicted(http: httpx.Client, keys: list[int], **more: Any) -> str:
    body = {"entities": {"customer": keys}, "request": {name: [value] * len(keys) for name, value in more.items()}}
    answer = http.post("/predict", json=body)
    assert answer.status_code == 200, answer.text
    identity: str = answer.headers["isthmus-answer"]
    return identity


@contextmanager
def recording(project: Project, *, model: bool = False) -> Iterator[httpx.Client]:
    """A server that records, whose answers are in the table behind the block."""
    with served(project, model=model) as http:
        yield http
    assert collect(project).problems == ()


def between(project: Project) -> Replay:
    now = project.now()
    return replay(project, first=clock.moment(now - 10**12), end=clock.moment(now + 10**12))


def only(report: Replay, cause: Cause, count: int = 1) -> str:
    """What was found of the only cause."""
    assert report.causes == {cause.value: count}, report
    with pytest.raises(GateFailed, match=cause.value):
        require_same(report)
    return report.differences[0].found


@pytest.fixture
def recorded(built: Shop) -> Shop:
    built.append("\n[server.record]\n", "isthmus.toml")
    return built


def altered(project: Project, alter: Alter) -> None:
    """Changes the answers that wait in the spool."""
    for path in segments(project.spool):
        changed = [
            msgspec.structs.replace(batch, groups=tuple(map(alter, batch.groups)))
            for batch in batches(path.read_bytes())
        ]
        path.write_bytes(b"".join(map(encoded, changed)))


def test_undisturbed_lookups_are_the_same(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    with recording(opened) as http:
        ids = [looked_up(http, list(range(n, n + 3))) for n in range(40)]
        looked_up(http, [-1])
        http.post(
            "/get-online-features", json={"features": SHELF, "entities": {"store": ["s1", "s2"], "product": [1, 2]}}
        )
    report = between(opened)
    assert (report.answers, report.same, report.causes) == (42, 42, {})
    require_same(report)
    assert replay(opened, ids[7]).same == 1
    with pytest.raises(RequestError, match="is not in the table"):
        replay(opened, "nobody-1")
    with pytest.raises(RequestError, match="is not an answer id"):
        replay(opened, "")
    with pytest.raises(RequestError, match="has none in that time range"):
        replay(opened, first=clock.moment(0), end=clock.moment(1))
    with pytest.raises(RequestError, match="needs an answer id"):
        replay(opened)
    with pytest.raises(RequestError, match="is empty"):
        replay(opened, first=clock.moment(opened.now()), end=clock.moment(opened.now()))
    with pytest.raises(PackageError, match="expected a package folder"):
        replay(opened, ids[0], package=recorded.root / "nowhere")
    done = commandline.run("answers", "replay", ids[0], "--project", str(recorded.root))
    assert "1 of 1 answers are bit-identical" in done.stdout
    done = commandline.run("answers", "collect", "--project", str(recorded.root), "--json")
    assert json.loads(done.stdout) == {"answers": 0, "missing": 0, "problems": []}
    done = commandline.run(
        "answers", "replay", "--from", "1970-01-01", "--to", "2100-01-01", "--project", str(recorded.root), "--json"
    )
    assert (done.returncode, json.loads(done.stdout)["same"]) == (0, 42)
    # Arrow has no zones with seconds, Python has.
    zones = "2024-03-01T01:00:05+01:00:05", "2024-03-01T00:00:00.000001Z"
    done = commandline.run(
        "answers", "replay", "--from", zones[0], "--to", zones[1], "--project", str(recorded.root), "--json"
    )
    assert (done.returncode, json.loads(done.stdout)["same"]) == (0, 42)


def test_a_request_that_cannot_be_read_any_more_is_named(recorded: Shop, project: Open) -> None:
    opened = project(recorded)

    def later(group: AnswerGroup) -> AnswerGroup:
        """Its requests of two rows as those of a version with another field."""
        if np.frombuffer(group.answers, ANSWER)["rows"].max() < 2:
            return group
        templates = tuple((head.replace(b"{", b'{"later":1,', 1), tail) for head, tail in group.templates)
        return msgspec.structs.replace(group, templates=templates)

    with served(opened) as http:
        looked_up(http, [1])
        body = {"features": SHELF, "entities": {"store": ["s1", "s2"], "product": [1, 2]}}
        http.post("/get-online-features", json=body)
    altered(opened, later)
    collect(opened)
    report = between(opened)
    assert "cannot be read any more" in only(report, Cause.KEY)
    assert report.same == 1


def test_answers_are_the_same_after_the_tables_were_maintained(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    known = customers(opened)
    with recording(opened) as http:
        for n in range(15):
            at = opened.now() - (40 - n) * MINUTE
            pushed(http, known[:1], at, at + MINUTE, 78 + n)
            collect_pushes(opened)
        ids = [looked_up(http, known[n : n + 3]) for n in range(20)]
    before = between(opened)
    for file in Path(opened.offline).rglob("*"):
        if file.is_file():
            os.utime(file, (time.time() - 100 * 86_400,) * 2)
    stored = RecordedAnswers.of(opened).read(ds.scalar(True))
    done = maintain(opened)
    assert done.problems == []
    assert done.tables[VIEW].merged > 10
    assert RecordedAnswers.of(opened).read(ds.scalar(True)) == stored
    assert between(opened) == before
    assert replay(opened, ids[-1]).same == 1
    assert before.same == 20


def test_a_row_that_came_late_is_named(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    one, two, *_ = customers(opened)
    now = opened.now()
    with recording(opened) as http:
        late = looked_up(http, [one])
        looked_up(http, [two])
        pushed(http, [one], now - 5 * MINUTE, now - 2 * MINUTE, 78, to="offline")
        collect_pushes(opened)
    report = between(opened)
    assert "reached Redis later" in only(report, Cause.LATE)
    assert report.differences[0].id == late
    assert report.same == 1


def test_a_push_that_is_not_in_the_history_is_named(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    _, two, *_ = customers(opened)
    now = opened.now()
    with recording(opened) as http:
        pushed(http, [two], now - 5 * MINUTE, now - 2 * MINUTE, 79, to="online")
        looked_up(http, [two])
    assert "written only to Redis" in only(between(opened), Cause.PUSH)


def test_a_push_that_waits_is_the_same_once_it_is_collected(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    _, two, *_ = customers(opened)
    now = opened.now()
    with recording(opened) as http:
        pushed(http, [two], now - 5 * MINUTE, now - 2 * MINUTE, 79)
        looked_up(http, [two])
    assert "waits for `isthmus pushes collect`" in only(between(opened), Cause.PUSH)
    collect_pushes(opened)
    assert between(opened).causes == {}


def test_a_server_whose_clock_is_behind_is_named(recorded: Shop, project: Open) -> None:
    one, *_ = customers(project(recorded))
    recorded.replace("now = 2024-03-01T00:00:00Z", "now = 2024-02-20T00:00:00Z", "isthmus.toml")
    opened = project(recorded)
    with recording(opened) as http:
        looked_up(http, [one])
    assert "was behind" in only(between(opened), Cause.CLOCK)


def set_back(group: AnswerGroup, seconds: float = 0.0) -> AnswerGroup:
    """Its answers but the first, of moments three minutes earlier, which took so many seconds."""
    answers = np.frombuffer(group.answers, ANSWER).copy()
    answers["at"][1:] -= 3 * MINUTE
    answers["seconds"][1:] = seconds
    return msgspec.structs.replace(group, answers=answers.tobytes())


def test_a_clock_that_went_back_is_named(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    one, two, *_ = customers(opened)
    now = opened.now()

    with served(opened) as http:
        first = looked_up(http, [one])
        looked_up(http, [two])
        # Known between the two moments: it was not there when the first was answered.
        pushed(http, [one], now - 5 * MINUTE, now - 2 * MINUTE, 78, to="offline")
        collect_pushes(opened)
    altered(opened, set_back)
    collect(opened)
    report = between(opened)
    assert "went back" in only(report, Cause.CLOCK)
    assert report.differences[0].id == first


def test_answers_that_overtake_others_are_no_clock_that_went_back(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    one, two, *_ = customers(opened)
    now = opened.now()

    def slow(group: AnswerGroup) -> AnswerGroup:
        return set_back(group, seconds=181.0)

    with served(opened) as http:
        looked_up(http, [one])
        looked_up(http, [two])
        pushed(http, [one], now - 5 * MINUTE, now - 2 * MINUTE, 78, to="offline")
        collect_pushes(opened)
    altered(opened, slow)
    collect(opened)
    only(between(opened), Cause.LATE)


def test_a_row_that_redis_has_lost_is_named(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    one, *_ = customers(opened)
    with recording(opened) as http:
        with opened.redis() as url, connect(url) as client:
            for name in client.scan_iter("shop:customer:*"):
                client.hdel(name, VIEW)
        looked_up(http, [one])
    assert "had been written" in only(between(opened), Cause.STORE)


def test_a_history_that_was_computed_otherwise_is_named(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    one, *_ = customers(opened)

    def other(group: AnswerGroup) -> AnswerGroup:
        (first, *rest) = group.views
        content = (np.frombuffer(first.content, np.int64) ^ 1).tobytes()
        return msgspec.structs.replace(group, views=(msgspec.structs.replace(first, content=content), *rest))

    with served(opened) as http:
        looked_up(http, [one])
    altered(opened, other)
    collect(opened)
    assert "recomputed" in only(between(opened), Cause.ENGINE)


def test_a_history_that_is_gone_is_named(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    one, two, *_ = customers(opened)
    with recording(opened) as http:
        looked_up(http, [one])
        looked_up(http, [two])
    shutil.rmtree(Path(opened.offline) / VIEW)
    assert "isthmus build" in only(between(opened), Cause.HISTORY, 2)


def test_rows_that_were_compacted_away_are_named(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    one, *_ = customers(opened)
    with recording(opened) as http:
        looked_up(http, [one])
    table = DeltaTable(str(Path(opened.offline) / VIEW))
    table.delete(f"customer = {one}")
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert only(between(opened), Cause.HISTORY)


def test_private_keys_are_found_by_their_hashes(recorded: Shop, project: Open) -> None:
    recorded.append('private = ["customer_orders"]\n', "isthmus.toml")
    opened = project(recorded)
    one, two, *_ = customers(opened)
    with recording(opened) as http:
        looked_up(http, [one, two])
        looked_up(http, [-77])
    report = between(opened)
    assert (report.answers, report.same) == (2, 1)
    assert "no key with the hash" in only(report, Cause.KEY)
    assert not any(
        "-77" in text for text in RecordedAnswers(opened.offline).read(ds.scalar(True))["request"].to_pylist()
    )
    (opened.recorded / "key").unlink()
    with pytest.raises(DataError, match="does not exist"):
        between(opened)
    assert not (opened.recorded / "key").exists(), "another would find nothing, and hide that"


@pytest.fixture
def deployed(exported: Shop, project: Open) -> Shop:
    exported.append("\n[server.record]\n", "isthmus.toml")
    verify(project(exported))
    deploy(project(exported))
    return exported


@pytest.mark.accept
@pytest.mark.slowest
def test_a_prediction_of_a_key_that_nobody_has_is_named(deployed: Shop, project: Open) -> None:
    deployed.append('private = ["customer_orders", "customer_facts", "shelf_demand"]\n', "isthmus.toml")
    opened = project(deployed)
    with recording(opened, model=True) as http:
        predicted(http, [3], **(REQUEST | {"store": "nowhere"}))
    assert "no key with the hash" in only(between(opened), Cause.KEY)


REQUEST = {"store": "s1", "product": 2, "hour": 9, "weight": 1.25}


def package_of(project: Project) -> Path:
    (folder,) = (project.state / "deployments").glob("[0-9a-f]*")
    return folder


@pytest.mark.accept
def test_predictions_are_the_same_and_what_is_not_has_a_cause(deployed: Shop, project: Open) -> None:
    opened = project(deployed)
    some = customers(opened)

    def alter(group: AnswerGroup) -> AnswerGroup:
        if group.route != "predict":
            return group
        sequence = np.frombuffer(group.answers, ANSWER)["sequence"]
        outputs, digest = np.frombuffer(group.outputs, "<u4").copy(), np.frombuffer(group.digest, np.uint64).copy()
        outputs[sequence == changed[0]] ^= 1
        digest[sequence == changed[1]] ^= 1
        return msgspec.structs.replace(group, outputs=outputs.tobytes(), digest=digest.tobytes())

    with served(opened, model=True) as http:
        for n in range(20):
            predicted(http, [some[n % len(some)]], **REQUEST)
        body = {
            "features": ["moment:hour_sin", "moment:heavy"],
            "entities": {"store": ["s1"], "product": [2], "hour": [9], "weight": [1.5]},
        }
        http.post("/get-online-features", json=body)
        ids = [predicted(http, [n], **REQUEST) for n in (some[0], some[1], -4)]
        changed = [int(identity.partition("-")[2], 16) for identity in ids]
    altered(opened, alter)
    collect(opened)
    report = between(opened)
    assert report.answers - report.same == 2
    assert report.causes == {Cause.ENGINE.value: 2}
    found = {difference.id: difference.found for difference in report.differences}
    assert "the model returns" in found[ids[0]]
    assert "give different inputs" in found[ids[1]]
    assert replay(opened, ids[2]).same == 1
    # The teacher reads by a key that came along.
    (row,) = explain(opened, ids[2]).rows
    assert row.keys == {"customer": -4, "store": "s1", "product": 2}
    assert sum(part.value for part in row.score.parts.values()) == pytest.approx(row.score.difference, abs=1e-12)

    # Another package, instead of the one that answered.
    other = opened.root / "other"
    shutil.copytree(package_of(opened), other)
    assert replay(opened, ids[2], package=other).same == 1
    assert "returned" in only(replay(opened, ids[0], package=other), Cause.PACKAGE)

    # One that reads other rows, whose keys are not in the request.
    inputs = [("customer_orders__orders_7d", Int64)]
    other = make_package(opened.root / "rows", opened.applied(), inputs=inputs, service="late_order_server")
    assert "reads customer_orders, not shelf_demand" in only(replay(opened, ids[2], package=other), Cause.PACKAGE)

    # A model that reads fewer views than the one that answered needs none of their keys.
    folder = make_package(
        opened.root / "fewer", opened.applied(), inputs=[("weight", Float64)], service="late_order_server"
    )
    smaller = DeployedModel(unverified_deployment(open_package(folder), ServingProfile(), 0, None))
    answers = ServedAnswers(opened)
    ((_, group),) = answers.predictions(answers.answer(ids[2]), smaller)
    assert isinstance(group, Group)
    assert (group.histories, group.then, group.now) == ({}, {}, {})
    assert len(predict_all(smaller, group.inputs(group.now))) == 1

    # A file of the package is another.
    model = next(package_of(opened).glob("model.*"))
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert replay(opened, ids[2]).causes == {Cause.PACKAGE.value: 1}
    shutil.rmtree(package_of(opened))
    report = replay(opened, ids[2])
    assert "is gone" in only(report, Cause.PACKAGE)


def test_answers_of_tensors_are_the_same_in_either_form(recorded: Shop, project: Open) -> None:
    opened = project(recorded)
    home = recorded.root / "tensors"
    home.mkdir()
    (home / "contract.json").write_bytes(CONTRACT.dumps())
    package, fed = make_drawing_package(home / "package"), frames(2)
    with (
        EmbeddedRedis(home) as redis,
        # Private views change nothing: tensors have no keys, and need no secret.
        serving(
            home, redis.url, record=Recording(private=tuple(CONTRACT.views)), spool=str(opened.spool),
            spool_key="ab" * 32,
        ) as server,
    ):  # fmt: skip
        put(server, package)
        first = server.http.post(INFER, json=as_json(fed, outputs=[{"name": "vector"}]))
        content, headers = as_binary(fed)
        second = server.http.post(INFER, content=content, headers=headers)
        refused = server.http.post(INFER, json=as_json({"frame": fed["frame"]}))
    assert (first.status_code, second.status_code, refused.status_code) == (200, 200, 422)
    assert "isthmus-answer" not in refused.headers
    shutil.copytree(package, folder_of(opened.deployment_file) / package_digest(package))
    assert collect(opened).answers == 2
    ids = [answer.headers["isthmus-answer"] for answer in (first, second)]
    assert [replay(opened, identity).same for identity in ids] == [1, 1]
    assert replay(opened, first=clock.moment(NOW), end=clock.moment(NOW + 1)).same == 2

    other = make_drawing_package(home / "other", weight=3.0)
    # The vector does not depend on that weight.
    assert replay(opened, ids[0], package=other).same == 1
    assert "returns other tensors" in only(replay(opened, ids[1], package=other), Cause.PACKAGE)
