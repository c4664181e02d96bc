"""A candidate beside the deployed model: who answers, what is compared, and when it is given up."""

import asyncio
import hashlib
import json
import math
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.generations import Generations
from isthmus.features.errors import ContractMismatch, GateFailed, PackageError
from isthmus.features.files import write_atomically
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import Float64, String
from isthmus.package.manifest import package_digest
from isthmus.serving.deployment.history import DeploymentHistory
from isthmus.serving.deployment.record import Approval, CandidateDeployment, Deployment
from isthmus.serving.http.predict import PredictCall, PredictionService
from isthmus.serving.limits import Limits
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.batches import Batches, Columns, Outputs
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.redis.store import Store
from isthmus.serving.rollout.decision import Decision, decision_file
from isthmus.serving.rollout.releases import deploy, full_history, promote, rollback
from isthmus.serving.rollout.trial import FAILURES, LEAST, TOLERANCE, WINDOW, CandidateRun
from isthmus.serving.state import State
from isthmus.serving.wire.messages import PredictRequest
from tests.serving.support import (
    CONTRACT,
    EVERYTHING,
    NOW,
    PUNCTUALITY,
    TABLES,
    Server,
    contract_of,
    make_package,
    serving,
    verdict_of,
    wait,
)

CARRIERS = [f"carrier {n}" for n in range(120)]
INPUTS = [("distance", Float64), ("carrier", String)]


def run(share: float = 0.1, digest: str = "a" * 64, objective: float = 1.0) -> CandidateRun:
    deployment = Deployment(
        model="late", package="/nowhere", digest=digest, contract="c", service="late", precision="int8", threads=1,
        deployed_at=NOW, verdict=Approval(NOW, 1),
    )  # fmt: skip
    candidate = CandidateDeployment(deployment=deployment, share=share, latency_objective_ms=objective)
    made = CandidateRun(candidate, PackageError("a test", "has no model"))
    made.refused = None
    return made


@given(st.floats(0, 0.999), st.lists(st.one_of(st.text(), st.integers()), min_size=1), st.binary(max_size=8))
def test_the_same_keys_are_always_answered_by_the_same_model(share: float, keys: list[Any], body: bytes) -> None:
    first = run(share).picks(["carrier"], {"carrier": keys, "other": [body]}, body)
    # The naive way: a number in [0, 1) of the digest and the first row's keys, held against the share.
    named = ("a" * 64 + repr([("carrier", keys[0])])).encode()
    place = int(hashlib.blake2b(named, digest_size=8).hexdigest(), 16) / 2**64
    assert first == (place < share)
    assert first == run(share).picks(["carrier"], {"carrier": keys[:1]}, b"another body")
    assert run(0.9999).picks(["carrier"], {"carrier": keys}, body) >= first, "a larger share keeps those it has"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5])
def test_a_share_of_the_keys_goes_to_the_candidate(share: float) -> None:
    found = sum(run(share).picks(["id"], {"id": [n]}, b"") for n in range(20_000)) / 20_000
    assert found == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 20_000))
    assert {run(share).picks([], {}, b"%d" % n) for n in range(2000)} == ({False, True} if share else {False})


def compared(first: list[float], tried: list[float]) -> tuple[int, int, float]:
    made = run(0.0)
    same = made.compare(np.array(first, np.float32), np.array(tried, np.float32))
    assert same == (made.differing == 0)
    return made.compared, made.differing, made.worst


@given(st.lists(st.tuples(*[st.floats(width=32)] * 2)))
def test_answers_are_compared_as_one_by_one(pairs: list[tuple[float, float]]) -> None:
    apart = []
    for one, other in pairs:
        if one == other or (math.isnan(one) and math.isnan(other)):
            apart.append(0.0)
        else:
            difference = abs(one - other)
            apart.append(math.inf if math.isnan(difference) else difference)
    expected = len(pairs), sum(value > TOLERANCE for value in apart), max(apart, default=0.0)
    assert compared([one for one, _ in pairs], [other for _, other in pairs]) == expected


@pytest.mark.parametrize("text", [b"{", b"{}", b'{"digest": "\xff"}'])
def test_a_damaged_decision_is_named(text: bytes) -> None:
    with pytest.raises(PackageError, match="is not a decision"):
        Decision.loads(text, "candidate.refused.json")


def test_a_canary_that_fails_more_often_is_given_up() -> None:
    made = run()
    for _ in range(20):
        made.standby.count(1, 1e-4)
    for n in range(FAILURES):
        assert made.refused is None
        made.counts.count(1, None)
        made.judge()
        assert (made.refused is not None) == (n == FAILURES - 1)
    assert made.refused == "3 of 3 predictions failed, compared with 0 of 20 for the deployed model"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("single", [1, 2, 5])
def test_a_canary_with_any_share_is_given_up_for_being_slow(share: float, single: int) -> None:
    made = run(objective=1.0)
    due = 0.0
    for number in range(2 * single * int(LEAST / min(share, 1 - share))):
        # Of so many requests one asks for a single row.
        rows = 1 if number // 20 % single == 0 else 3
        due += share
        if due < 1:
            made.standby.count(rows, 1e-4)
            continue
        due -= 1
        made.counts.count(rows, 2e-3)
        made.judge()
    assert made.refused is not None


@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.parametrize(
    ("own", "others", "busy", "given_up"),
    [
        # Shares of the runs that are beyond the objective; `busy` are those of both in a tenth of the time.
        (1.0, 0.0, 0.0, True),
        (0.05, 0.005, 0.0, True),
        (0.05, 0.002, 0.05, True),
        (0.009, 0.009, 0.0, False),
        (0.002, 0.002, 0.1, False),
    ],
)
def test_a_canary_is_given_up_for_more_slow_runs_than_chance_has(
    share: float, own: float, others: float, busy: float, given_up: bool
) -> None:
    """A busy machine holds up some runs of either model, for milliseconds."""
    made, random = run(objective=1.0), np.random.default_rng(11)
    for n in range(int(2 * WINDOW / share)):
        tried, delayed = random.random() < share, busy if n % 1000 < 100 else 0.0
        slow = random.random() < max(own if tried else others, delayed)
        (made.counts if tried else made.standby).count(1, 2e-3 if slow else 1e-4)
        if tried:
            made.judge()
    assert (made.refused is not None) == given_up


def test_failures_of_a_large_canary_are_counted_anew() -> None:
    made = run()
    for n in range(10 * WINDOW):
        made.counts.count(1, None if n % WINDOW == 7 else 1e-4)
        made.judge()
    assert made.refused is None


def test_a_canary_that_fails_no_more_often_goes_on() -> None:
    made = run()
    for n in range(1000):
        made.standby.count(1, None if n % 10 == 0 else 1e-4)
        made.counts.count(1, None if n % 10 == 5 else 1e-4)
        made.judge()
    assert made.refused is None


@pytest.mark.parametrize(("first", "tried", "given_up"), [(5e-4, 2e-3, True), (5e-4, 9e-4, False), (2e-3, 4e-3, False)])
def test_a_canary_above_the_objective_is_given_up_unless_the_deployed_model_is_too(
    first: float, tried: float, given_up: bool
) -> None:
    made = run(objective=1.0)
    for n in range(LEAST):
        made.standby.count(1, first)
        # A thousand rows may take their time.
        made.standby.count(1000, 1.0)
        made.counts.count(1, tried if n % 5 == 0 else 1e-4)
        made.judge()
        assert made.refused is None or n == LEAST - 1
    assert (made.refused is not None) == given_up
    if given_up:
        assert made.refused == (
            "the p99 for one row is 2 ms, above the objective of 1 ms, while the deployed model has 0.5 ms"
        )


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    return [make_package(tmp_path / f"package {n}", inputs=INPUTS, weight=float(n)) for n in range(3)]


def put(package: Path, file: Path, at: int, share: float | None = None) -> Deployment:
    verdict = verdict_of(package)
    done = deploy(package, verdict, CONTRACT, ServingProfile(), file, tables=TABLES, at=at, share=share)
    return done.deployment


def test_a_candidate_is_promoted_or_dropped(packages: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "state" / "deployment.json"
    with pytest.raises(GateFailed, match="nothing is deployed; expected a deployment to try a package beside"):
        put(packages[0], file, NOW, 0.0)
    first = put(packages[0], file, NOW)
    with pytest.raises(GateFailed, match="has no candidate"):
        promote(file, Generations(CONTRACT), at=NOW)
    beside = put(packages[1], file, NOW + 1, 0.25)
    assert (beside.digest, beside.candidate and beside.candidate.share) == (first.digest, 0.25)
    assert (
        rollback(file, Generations(CONTRACT), at=NOW + 2).deployment
        == first
        == Deployment.loads(file.read_bytes(), str(file))
    )
    put(packages[1], file, NOW + 3, 0.0)
    with pytest.raises(ContractMismatch):
        promote(file, Generations(contract_of(PUNCTUALITY, EVERYTHING, request=())), at=NOW + 4)
    promoted = promote(file, Generations(CONTRACT), at=NOW + 5).deployment
    assert (promoted.digest, promoted.candidate) == (package_digest(packages[1]), None)
    assert rollback(file, Generations(CONTRACT), at=NOW + 6).deployment.digest == first.digest
    actions = [event.action for event in DeploymentHistory(file).read()]
    assert actions == ["deploy", "canary", "drop", "shadow", "promote", "rollback"]


def test_what_was_given_up_is_not_promoted_and_is_in_the_history(packages: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "state" / "deployment.json"
    put(packages[0], file, NOW)
    put(packages[1], file, NOW + 1, 0.5)
    decision = Decision(package_digest(packages[1]), NOW + 1, NOW + 2, "it was slow")
    write_atomically(decision_file(file), decision.dumps())
    with pytest.raises(GateFailed, match="was given up: it was slow"):
        promote(file, Generations(CONTRACT), at=NOW + 3)
    rollback(file, Generations(CONTRACT), at=NOW + 4)
    events = full_history(file)
    assert [(event.action, event.why) for event in events[2:]] == [("refuse", "it was slow"), ("drop", "")]
    assert events == DeploymentHistory(file).read()
    put(packages[1], file, NOW + 5, 0.5)
    promote(file, Generations(CONTRACT), at=NOW + 6)


def candidate(server: Server) -> dict[str, Any]:
    models = server.http.get("/models").json()["models"]
    found: dict[str, Any] = models[0].get("candidate", {}) if models else {}
    return found


def answered(server: Server, distance: float = 1.0) -> dict[str, str]:
    """Carrier to the digest that answered it."""
    found = {}
    for carrier in CARRIERS:
        answer = server.predict(request={"distance": [distance], "carrier": [carrier]})
        assert answer.status_code == 200, answer.text
        found[carrier] = answer.json()["package"]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    return folder


def test_a_shadow_is_compared_and_never_returned(packages: list[Path], folder: Path) -> None:
    first, same, other = packages[1], make_package(folder / "same", inputs=INPUTS, weight=1.0 + 1e-5), packages[2]
    with serving(folder, "redis://127.0.0.1:1") as server:
        server.deploy(first)
        server.deploy(same, share=0.0)
        wait(lambda: candidate(server).get("package") == package_digest(same), "the shadow")
        assert set(answered(server).values()) == {package_digest(first)}
        wait(lambda: candidate(server)["compared"] + candidate(server)["dropped"] == len(CARRIERS), "the comparisons")
        found = candidate(server)
        assert (found["role"], found["share"], found["differing"], found["refused"]) == ("shadow", 0.0, 0, None)
        assert found["compared"] == found["tried"]["requests"] > 0
        assert found["deployed"]["requests"] == len(CARRIERS)
        assert 0 < found["worst"] < TOLERANCE
        server.deploy(other, share=0.0)
        wait(lambda: candidate(server)["package"] == package_digest(other), "the other shadow")
        answer = server.predict(request={"distance": [1.0, 0.0], "carrier": ["AA", "AA"]}).json()
        assert answer["package"] == package_digest(first)
        wait(lambda: candidate(server)["compared"] == 2, "the comparison")
        assert candidate(server)["differing"] == 1, "sigmoid(1) and sigmoid(2), but sigmoid(0) twice"
        assert candidate(server)["worst"] == pytest.approx(0.149739, abs=1e-5)
        lines = server.http.get("/metrics").text.splitlines()
        assert 'isthmus_trial_predictions_total{model="late",outcome="differing",role="shadow"} 1.0' in lines


def test_a_request_that_a_shadow_refuses_is_its_failure(packages: list[Path], folder: Path) -> None:
    narrow = make_package(folder / "narrow", inputs=INPUTS[:1])
    with serving(folder, "redis://127.0.0.1:1") as server:
        server.deploy(narrow)
        server.deploy(packages[1], share=0.0)
        wait(lambda: bool(candidate(server)), "the shadow")
        for _ in range(5):
            assert server.predict(request={"distance": [1.0]}).json()["package"] == package_digest(narrow)
        wait(lambda: candidate(server)["tried"] == {"requests": 5, "failures": 5, "p99_ms": None}, "the failures")


def test_a_canary_answers_its_keys_and_one_that_fails_is_given_up_without_a_lost_request(
    redis_url: str, folder: Path
) -> None:
    first, second = make_package(folder / "first"), make_package(folder / "second", weight=2.0, picky=True)
    digests = [package_digest(first), package_digest(second)]

    def ask(server: Server, distance: float | str) -> list[str]:
        found = []
        for carrier in CARRIERS:
            answer = server.predict(entities={"carrier": [carrier]}, request={"distance": [distance]})
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["package"])
        return found

    with serving(folder, redis_url) as server:
        server.deploy(first)
        server.deploy(second, share=0.3)
        wait(lambda: bool(candidate(server)), "the canary")
        before = ask(server, 1)
        assert set(before) == set(digests)
        assert 0.15 < before.count(digests[1]) / len(before) < 0.45
        assert ask(server, 2) == before, "the same keys, the same model"
        assert candidate(server)["tried"] | {"p99_ms": 0} == {
            "requests": 2 * before.count(digests[1]), "failures": 0, "p99_ms": 0,
        }  # fmt: skip
        # It cannot be run over an infinite number.
        assert set(ask(server, "Infinity")) == {digests[0]}
        found = candidate(server)
        assert f"{FAILURES} of " in found["refused"]
        assert found["tried"]["failures"] == FAILURES
        assert set(ask(server, 1)) == {digests[0]}
        wait(lambda: decision_file(server.deployment).exists(), "the decision")
        decision = json.loads(decision_file(server.deployment).read_bytes())
        assert (decision["digest"], decision["why"]) == (digests[1], found["refused"])
        assert full_history(server.deployment)[-1].action == "refuse"
    with serving(folder, redis_url) as server:
        wait(lambda: bool(candidate(server)), "the canary")
        assert candidate(server)["refused"] == decision["why"], "what another one has decided"
        assert set(ask(server, 1)) == {digests[0]}


def test_a_canary_that_hangs_is_given_up_without_a_lost_request(packages: list[Path], folder: Path) -> None:
    file, never = folder / "deployment.json", threading.Event()
    put(packages[0], file, NOW)
    beside = put(packages[1], file, NOW + 1, 0.999)
    assert beside.candidate is not None
    tried = CandidateRun(beside.candidate, DeployedModel(beside.candidate.deployment))
    state = State(Generations(CONTRACT), model=DeployedModel(beside), trial=tried)
    assert state.candidate is not None

    def hang(_columns: Columns) -> Outputs:
        never.wait(10)
        raise AssertionError("nobody waits any more")

    state.candidate.batches = Batches(hang, seconds=1.0)
    limits = Limits(deadline_seconds=1.0)
    store = Store("redis://127.0.0.1:1", limits)
    predictions = PredictionService(store, limits, Metrics(lambda: state, lambda: NOW), lambda: NOW)

    async def ask() -> list[str]:
        found = []
        for n in range(FAILURES + 1):
            body = json.dumps({"request": {"distance": [1.0], "carrier": [f"carrier {n}"]}}).encode()
            asked = msgspec.json.decode(body, type=PredictRequest)
            async with asyncio.timeout(limits.deadline_seconds):
                predictor, _ = await predictions.predict(PredictCall(state, asked, body))
                found.append(predictor.model.deployment.digest)
        never.set()
        return found

    assert asyncio.run(ask()) == [beside.digest] * (FAILURES + 1)
    assert tried.refused == f"{FAILURES} of {FAILURES} predictions failed, compared with 0 of 0 for the deployed model"


def test_a_passing_error_of_the_store_is_not_the_canarys(packages: list[Path], folder: Path) -> None:
    """The deployed model reads no view, and answers without Redis."""
    with serving(folder, "redis://127.0.0.1:1") as server:
        server.deploy(packages[1])
        server.deploy(make_package(folder / "reads a view"), share=0.9)
        wait(lambda: bool(candidate(server)), "the canary")
        assert set(answered(server).values()) == {package_digest(packages[1])}
        found = candidate(server)
        assert (found["refused"], found["tried"]["requests"]) == (None, 0)


def test_what_fails_with_both_models_is_counted_for_neither(redis_url: str, folder: Path) -> None:
    with serving(folder, redis_url) as server:
        server.deploy(make_package(folder / "first", picky=True))
        server.deploy(make_package(folder / "second", weight=2.0, picky=True), share=0.5)
        wait(lambda: bool(candidate(server)), "the canary")
        by_canary = 0
        for carrier in CARRIERS[:20]:
            asked: dict[str, Any] = {"entities": {"carrier": [carrier]}}
            assert server.predict(**asked, request={"distance": ["Infinity"]}).status_code == 500
            answer = server.predict(**asked, request={"distance": [1]}).json()
            by_canary += answer["package"] != server.http.get("/models").json()["models"][0]["package"]
        found = candidate(server)
        assert (found["refused"], found["tried"]["failures"]) == (None, 0)
        assert found["deployed"]["failures"] == 20 - by_canary > 0, "those that were its own alone"


def test_an_answer_without_a_number_is_a_failure_where_the_deployed_model_has_one(
    packages: list[Path], folder: Path
) -> None:
    both = make_package(folder / "both", inputs=INPUTS, weight=3.0, blank=True)
    blank = make_package(folder / "blank", inputs=INPUTS, weight=2.0, blank=True)

    def ask(server: Server) -> list[tuple[str, Any]]:
        found = []
        for carrier in CARRIERS[:20]:
            answer = server.predict(request={"distance": ["Infinity"], "carrier": [carrier]}).json()
            found.append((answer["package"], answer["predictions"][0]))
        return found

    with serving(folder, "redis://127.0.0.1:1") as server:
        server.deploy(both)
        server.deploy(blank, share=0.9)
        wait(lambda: bool(candidate(server)), "the canary")
        assert {number for _, number in ask(server)} == {"NaN"}
        assert candidate(server)["refused"] is None, "neither has a number"
        server.deploy(packages[1])
        server.deploy(blank, share=0.9)
        wait(lambda: candidate(server).get("tried", {}).get("requests") == 0, "the canary beside another model")
        assert set(ask(server)) == {(package_digest(packages[1]), 1.0)}
        assert f"{FAILURES} of {FAILURES} predictions failed" in candidate(server)["refused"]


def test_a_candidate_of_an_outdated_contract_is_given_up(redis_url: str, folder: Path) -> None:
    changed = contract_of(PUNCTUALITY, EVERYTHING, request=())
    with serving(folder, redis_url) as server:
        server.deploy(make_package(folder / "first"))
        server.deploy(make_package(folder / "second", weight=2.0), share=0.5)
        wait(lambda: bool(candidate(server)), "the canary")
        write_atomically(server.contract, changed.dumps())
        wait(lambda: candidate(server)["refused"] is not None, "the refusal")
        assert "request field distance is gone" in candidate(server)["refused"]
        wait(lambda: decision_file(server.deployment).exists(), "the decision")
