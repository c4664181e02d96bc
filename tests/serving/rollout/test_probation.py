"""A whole deployment that fails or is slow is undone, once, without a failed request; nothing else undoes it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.features import clock
from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Column
from isthmus.features.errors import ContractMismatch, GateFailed, PackageError
from isthmus.features.files import write_atomically
from isthmus.features.profiles import ServingProfile
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import Float64, String
from isthmus.package.manifest import package_digest
from isthmus.serving.deployment.history import DeploymentHistory
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.rollout.decision import Decision, decision_file
from isthmus.serving.rollout.releases import CACHED, deploy, full_history, promote, rollback, undo
from isthmus.serving.rollout.trial import FAILURES, WINDOW, ProbationRun
from tests.serving.support import (
    CONTRACT,
    EVERYTHING,
    NOW,
    PUNCTUALITY,
    TABLES,
    Server,
    contract_of,
    fill,
    make_package,
    serving,
    verdict_of,
    wait,
)

INPUTS = [("distance", Float64), ("carrier", String)]
HOUR_SECONDS = 3600.0
NOWHERE = "redis://127.0.0.1:1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "deployment.json"


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    return [make_package(tmp_path / f"package {n}", inputs=INPUTS, weight=float(n)) for n in range(3)]


def put(package: Path, file: Path, at: int, share: float | None = None, seconds: float = HOUR_SECONDS) -> Deployment:
    profile = ServingProfile(probation_seconds=seconds, latency_objective_ms=2.0)
    verdict = verdict_of(package)
    return deploy(package, verdict, CONTRACT, profile, file, tables=TABLES, at=at, share=share).deployment


def test_a_deployment_knows_the_way_back_and_until_when(packages: list[Path], file: Path) -> None:
    first = put(packages[0], file, NOW)
    assert first.probation is None, "there is nothing before it"
    for at in (NOW + 1, NOW + 2):
        second = put(packages[1], file, at)
        assert second.probation is not None
        assert second.probation.before == first, "the same again has before it what it had"
        assert (second.probation.until, second.probation.latency_objective_ms) == (at + 3_600_000_000, 2.0)
    assert put(packages[1], file, NOW + 3, share=0.5).probation is None, "one trial at a time"
    promoted = promote(file, Generations(CONTRACT), at=NOW + 4, probation_seconds=HOUR_SECONDS).deployment
    assert promoted.probation is None, "it is what was there before"
    put(packages[2], file, NOW + 5, share=0.0)
    promoted = promote(file, Generations(CONTRACT), at=NOW + 6, probation_seconds=HOUR_SECONDS).deployment
    assert promoted.probation is not None
    assert promoted.probation.before.digest == package_digest(packages[1])
    assert rollback(file, Generations(CONTRACT), at=NOW + 7).deployment.probation is None
    assert put(packages[0], file, NOW + 8, seconds=0).probation is None
    assert all(event.deployment == event.deployment.without_trials for event in DeploymentHistory(file).read())


def test_after_probation_nothing_is_there_for_the_former_model(packages: list[Path], file: Path) -> None:
    first, second = put(packages[0], file, NOW), put(packages[1], file, NOW + 1)
    assert second.probation is not None
    assert second.to_load(second.probation.until - 1) == [second.without_trials, first]
    assert second.to_load(second.probation.until) == [second.without_trials]


def test_timing_two_models_takes_a_tenth_of_the_time(packages: list[Path], file: Path) -> None:
    first, second = put(packages[0], file, NOW), put(packages[1], file, NOW + 1)
    assert second.probation is not None
    made = ProbationRun(second, second.probation, DeployedModel(first))
    assert [made.begin(), made.begin()] == [True, False], "a single pair at a time"
    made.end(60.0)
    assert not made.begin()
    made.end(0.0)
    assert made.begin()


@pytest.mark.parametrize(
    ("new", "old", "undone"),
    [
        # Of 1,000 runs: those beyond the objective of 2 ms.
        (1000, 0, True),
        (30, 0, True),
        (11, 0, False),
        (40, 9, True),
        (16, 9, False),
    ],
)
def test_a_deployment_is_undone_for_more_slow_runs_than_chance_has(
    packages: list[Path], file: Path, new: int, old: int, undone: bool
) -> None:
    """A busy machine holds up some runs of either model, for milliseconds."""
    first, second = put(packages[0], file, NOW), put(packages[1], file, NOW + 1)
    assert second.probation is not None
    made = ProbationRun(second, second.probation, DeployedModel(first))
    for n in range(WINDOW):
        made.counts.seconds.append(5e-3 if n < new else 1e-4)
        made.standby.seconds.append(5e-3 if n >= WINDOW - old else 1e-4)
    made.counts.requests = 50
    made.judge()
    assert (made.refused is not None) == undone


def test_the_cache_has_the_package_before_however_old_it_is(packages: list[Path], file: Path) -> None:
    now = clock.now()
    first = put(packages[0], file, now)
    for n in range(CACHED):
        put(packages[1], file, now + n, share=0.0)
    promote(file, Generations(CONTRACT), at=now + CACHED, probation_seconds=HOUR_SECONDS)
    assert not any(event.deployment.digest == first.digest for event in DeploymentHistory(file).read()[-CACHED:])
    assert Path(first.package).is_dir()
    assert undo(file, Deployment.loads(file.read_bytes(), str(file)), "it failed", at=now + 99)
    assert Deployment.loads(file.read_bytes(), str(file)).digest == first.digest


def test_after_probation_the_way_back_is_kept_and_verified(packages: list[Path], file: Path) -> None:
    then = clock.now() - 1_000_000
    put(packages[0], file, then)
    second = put(packages[1], file, then + 1, seconds=1e-6)
    for n in range(CACHED):
        put(packages[2], file, then + 2 + n, share=0.0)
    third = promote(file, Generations(CONTRACT), at=then + 99, probation_seconds=1e-6).deployment
    assert third.probation is not None
    assert third.probation.until < clock.now()
    assert Path(second.package).is_dir()
    changed = Generations(contract_of(PUNCTUALITY, EVERYTHING, request=(Column("distance", Float64),)))
    with pytest.raises(ContractMismatch, match="carrier"):
        undo(file, third, "it lost", at=then + 100, generations=changed)
    model = Path(second.package) / "golden.json"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1])
    with pytest.raises(PackageError):
        undo(file, third, "it lost", at=then + 100, generations=Generations(CONTRACT))
    assert Deployment.loads(file.read_bytes(), str(file)) == third
    model.write_bytes(whole)
    assert undo(file, third, "it lost", at=then + 100, generations=Generations(CONTRACT))
    restored = Deployment.loads(file.read_bytes(), str(file))
    assert (restored.digest, restored.probation) == (second.digest, None)


def test_a_deployment_is_undone_once_with_its_reason(packages: list[Path], file: Path) -> None:
    first, second = put(packages[0], file, NOW), put(packages[1], file, NOW + 1)
    why = f"{second.digest[:12]} was undone: it failed"
    assert undo(file, second, "it failed", at=NOW + 2)
    assert not undo(file, second, "it was slow", at=NOW + 3), "another worker was first"
    restored = Deployment.loads(file.read_bytes(), str(file))
    assert (restored.digest, restored.deployed_at, restored.probation) == (first.digest, NOW + 2, None)
    assert restored.undone is not None
    assert (restored.undone.digest, restored.undone.why) == (second.digest, why)
    assert [(event.action, event.why) for event in DeploymentHistory(file).read()] == [
        ("deploy", ""), ("deploy", ""), ("rollback", why),
    ]  # fmt: skip
    again = put(packages[1], file, NOW + 4)
    assert not undo(file, second, "it failed", at=NOW + 5), "it is another deployment"
    assert (again.undone, Deployment.loads(file.read_bytes(), str(file))) == (None, again)


def test_a_rollback_after_a_server_has_gone_back_goes_no_further(packages: list[Path], file: Path) -> None:
    """Whoever sees a deployment fail may be a second later than the server."""
    first, second, third = (put(package, file, NOW + n) for n, package in enumerate(packages[:3]))
    assert undo(file, third, "it failed", at=NOW + 3)
    why = f"{third.digest[:12]} was undone: it failed"
    with pytest.raises(GateFailed, match=f"gone back by itself: {why}; expected --to"):
        rollback(file, Generations(CONTRACT), at=NOW + 4)
    assert Deployment.loads(file.read_bytes(), str(file)).digest == second.digest
    assert rollback(file, Generations(CONTRACT), at=NOW + 5, to=first.digest[:6]).deployment.digest == first.digest
    put(packages[1], file, NOW + 6)
    assert rollback(file, Generations(CONTRACT), at=NOW + 7).deployment.digest == first.digest


def test_nothing_goes_back_to_what_is_being_given_up(packages: list[Path], file: Path) -> None:
    """A server that gives a deployment up while the next deployment is under way can only say so."""
    first, second = put(packages[0], file, NOW), put(packages[1], file, NOW + 1)
    write_atomically(decision_file(file), Decision(second.digest, NOW + 1, NOW + 2, "it failed").dumps())
    with pytest.raises(GateFailed, match="was given up: it failed"):
        put(packages[2], file, NOW + 3, share=0.5)
    assert Deployment.loads(file.read_bytes(), str(file)) == second
    third = put(packages[2], file, NOW + 4)
    assert third.probation is not None
    assert third.probation.before == first
    again = put(packages[1], file, NOW + 5)
    assert again.probation is not None
    assert again.probation.before == third.without_trials, "the decision was about another deployment of it"


KILLED = """
import os, signal, sys
from pathlib import Path
from isthmus.serving.deployment import history
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.rollout import releases
from tests.serving.support import NOW

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

step, file = sys.argv[1], Path(sys.argv[2])
owner, name = {"switch": (releases, "write_atomically"), "history": (history.DeploymentHistory, "add")}[step]
setattr(owner, name, kill)
releases.undo(file, Deployment.loads(file.read_bytes(), str(file)), "it failed", at=NOW + 2)
"""


@pytest.mark.parametrize("step", ["switch", "history"])
def test_a_server_that_is_killed_while_it_undoes_leaves_all_of_it_or_nothing(
    packages: list[Path], file: Path, step: str
) -> None:
    first, second = put(packages[0], file, NOW), put(packages[1], file, NOW + 1)
    done = subprocess.run([sys.executable, "-c", KILLED, step, file], check=False, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    if step == "switch":
        assert Deployment.loads(file.read_bytes(), str(file)) == second
        assert [event.action for event in full_history(file)] == ["deploy", "deploy"]
        assert undo(file, second, "it failed", at=NOW + 2)
    assert Deployment.loads(file.read_bytes(), str(file)).digest == first.digest
    reasons = [(event.action, event.why) for event in full_history(file)]
    assert reasons[2:] == [("rollback", f"{second.digest[:12]} was undone: it failed")]
    put(packages[2], file, NOW + 3)
    assert [event.action for event in DeploymentHistory(file).read()] == ["deploy", "deploy", "rollback", "deploy"]
    assert rollback(file, Generations(CONTRACT), at=NOW + 4).deployment.digest == first.digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    return folder


def listed(server: Server) -> dict[str, Any]:
    models = server.http.get("/models").json()["models"]
    return models[0] if models else {}


def swap(
    server: Server, first: Path, second: Path, seconds: float = HOUR_SECONDS, objective_ms: float = 1.0
) -> tuple[str, str]:
    """Deploys a package and then another; returns their digests once the second is on probation in every worker."""
    server.deploy(first)
    wait(lambda: everywhere(server, lambda model: "package" in model), "the first model")
    server.deploy(second, probation=seconds, at=clock.now(), objective_ms=objective_ms)
    digest = package_digest(second)
    wait(lambda: everywhere(server, lambda model: model["package"] == digest and "probation" in model), "the second")
    return package_digest(first), digest


def everywhere(server: Server, holds: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a model is so in every worker, as far as many connections of their own can tell."""
    found = []
    for _ in range(12):
        with httpx.Client(base_url=server.http.base_url) as http:
            models = http.get("/models").json()["models"]
            found.append(bool(models) and holds(models[0]))
    return all(found)


def ask(server: Server, distance: float | str, **entities: Any) -> httpx.Response:
    """An answer over a connection of its own: any worker's."""
    body = {"request": {"distance": [distance], "carrier": ["AA"]}, "entities": entities}
    with httpx.Client(base_url=server.http.base_url, timeout=10) as http:
        return http.post("/predict", json=body)


def undone(server: Server, first: str, second: str) -> str:
    """Waits until a deployment was undone, and returns why."""
    wait(lambda: everywhere(server, lambda model: "undone" in model), "the way back", 60)
    model = listed(server)
    assert (model["package"], model["undone"]["package"]) == (first, second)
    assert "probation" not in model, "what was gone back to is not gone back from"
    events = DeploymentHistory(server.deployment).read()
    assert [event.action for event in events] == ["deploy", "deploy", "rollback"], "once"
    assert events[-1].why == model["undone"]["why"]
    (newest, *_) = server.http.get("/status").json()["history"]
    assert (newest["action"], newest["digest"], newest["why"]) == ("rollback", first, events[-1].why)
    assert state_of(server) == "undone"
    page = server.http.get("/status", headers={"accept": "text/html"}).text
    assert page.count("was undone: ") == 2
    assert sum(line["event"] == "deployment undone" for line in server.lines()) == 1
    why: str = model["undone"]["why"]
    return why


def state_of(server: Server) -> str:
    lines = server.http.get("/metrics").text.splitlines()
    (state,) = [
        line.split('"')[3] for line in lines if line.startswith("isthmus_deployment_state{") and line[-3:] == "1.0"
    ]
    return state


@pytest.mark.accept
@pytest.mark.parametrize(("how", "workers"), [
    ("picky", 2), ("blank", 1),
    pytest.param("picky", 1, marks=pytest.mark.accept), pytest.param("blank", 2, marks=pytest.mark.accept),
])  # fmt: skip
def test_a_deployment_that_fails_is_undone_without_a_lost_request(folder: Path, how: str, workers: int) -> None:
    picky = how == "picky"
    bad = make_package(folder / "bad", inputs=INPUTS, weight=2.0, picky=picky, blank=not picky)
    good = make_package(folder / "good", inputs=INPUTS)
    with serving(folder, NOWHERE, workers=workers) as server:
        first, second = swap(server, good, bad)
        assert ask(server, 1).json()["package"] == second
        assert state_of(server) == "probation"
        for _ in range(FAILURES * workers):
            answer = ask(server, "Infinity")
            assert (answer.status_code, answer.json()["predictions"], answer.json()["package"]) == (200, [1.0], first)
        why = undone(server, first, second)
        assert f"{second[:12]} was undone: {FAILURES} of " in why
        assert "for the former model" in why
        assert ask(server, 1).json()["package"] == first
    with serving(folder, NOWHERE) as server:
        wait(lambda: listed(server).get("package") == first, "the model")
        assert listed(server)["undone"] == {"package": second, "why": why}
        assert [event.action for event in DeploymentHistory(server.deployment).read()] == [
            "deploy",
            "deploy",
            "rollback",
        ]


@pytest.mark.accept
def test_a_deployment_that_alone_is_slow_is_undone(folder: Path) -> None:
    slow = make_package(folder / "slow", inputs=INPUTS, weight=2.0, ballast=16)
    with serving(folder, NOWHERE) as server:
        # Far from both models: on two busy cores, their p99 is about one and about ten milliseconds.
        first, second = swap(server, make_package(folder / "quick", inputs=INPUTS), slow, objective_ms=4.0)
        asked = {"distance": [1.0], "carrier": ["AA"]}

        def answered() -> bool:
            assert all(server.predict(request=asked).status_code == 200 for _ in range(50))
            return "undone" in listed(server)

        wait(answered, "the way back", 240)
        why = undone(server, first, second)
        assert "above the objective of 4 ms, while the former model has " in why


@pytest.mark.accept
def test_neither_the_store_nor_a_request_nor_what_both_cannot_do_undoes_a_deployment(folder: Path) -> None:
    first, second = [make_package(folder / name, weight=w, picky=True) for name, w in (("first", 1.0), ("second", 2.0))]
    with ExitStack() as redis:
        embedded = redis.enter_context(EmbeddedRedis(folder / "redis"))
        fill(embedded.url)
        with serving(folder, embedded.url) as server:
            undone_by_none_of_it(server, first, second, redis.close)


def undone_by_none_of_it(server: Server, first: Path, second: Path, stop: Callable[[], None]) -> None:
    _, digest = swap(server, first, second)
    for _ in range(2 * FAILURES):
        assert ask(server, "Infinity").status_code == 500, "both fail"
        assert ask(server, "far").status_code == 422
        assert ask(server, 1, train=["x"]).status_code == 422
    assert ask(server, 1).json()["package"] == digest
    stop()
    for _ in range(2 * FAILURES):
        assert ask(server, 1).status_code == 503
    found = listed(server)
    assert (found["package"], found["probation"]["refused"]) == (digest, None)
    assert found["probation"]["deployed"] | {"p99_ms": 0} == {"requests": 1, "failures": 0, "p99_ms": 0}


@pytest.mark.accept
def test_requests_without_what_the_deployed_model_needs_have_an_answer_and_undo_nothing(folder: Path) -> None:
    """What is in a request is for the model in force to say, and its clients need time to follow."""
    narrow = make_package(folder / "narrow", inputs=INPUTS[:1])
    with serving(folder, NOWHERE) as server:
        first, second = swap(server, narrow, make_package(folder / "wide", inputs=INPUTS))
        for _ in range(2 * FAILURES):
            assert server.predict(request={"distance": [1]}).json()["package"] == first
            assert ask(server, 1).json()["package"] == second
        assert server.predict(request={"speed": [1]}).status_code == 422
        found = listed(server)["probation"]
        assert (found["refused"], found["deployed"]["requests"]) == (None, 2 * FAILURES)
        outcomes = [line for line in server.http.get("/metrics").text.splitlines() if 'outcome="refused"' in line]
        assert outcomes == [
            f'isthmus_trial_predictions_total{{model="late",outcome="refused",role="deployed"}} {2 * FAILURES}.0'
        ]
        assert {line["field"] for line in server.lines() if line["event"] == "only the former model accepts this"} == {
            "request.carrier"
        }


@pytest.mark.accept
def test_a_request_that_the_former_model_refuses_compares_nothing(folder: Path) -> None:
    narrow = make_package(folder / "narrow", inputs=INPUTS[:1])
    with serving(folder, NOWHERE) as server:
        _, second = swap(server, make_package(folder / "wide", inputs=INPUTS), narrow)
        for _ in range(20):
            assert server.predict(request={"distance": [1]}).json()["package"] == second

        def compared() -> bool:
            assert ask(server, 1).json()["package"] == second
            return bool(listed(server)["probation"]["former"]["requests"])

        wait(compared, "a request for both")
        assert listed(server)["probation"]["former"]["failures"] == 0
        assert not [line for line in server.lines() if line["event"] == "former failed"]


@pytest.mark.accept
@pytest.mark.slowest
def test_probation_goes_on_after_a_restart(folder: Path) -> None:
    good, bad = make_package(folder / "good", inputs=INPUTS), make_package(folder / "bad", inputs=INPUTS, picky=True)
    with serving(folder, NOWHERE) as server:
        first, second = swap(server, good, bad)
    with serving(folder, NOWHERE) as server:
        wait(lambda: listed(server).get("package") == second, "the model")
        for _ in range(FAILURES):
            assert ask(server, "Infinity").json()["package"] == first
        undone(server, first, second)


@pytest.mark.accept
@pytest.mark.slowest
def test_after_probation_errors_are_errors(folder: Path) -> None:
    good, bad = make_package(folder / "good", inputs=INPUTS), make_package(folder / "bad", inputs=INPUTS, picky=True)
    with serving(folder, NOWHERE) as server:
        _, second = swap(server, good, bad, seconds=5)
        wait(lambda: "probation" not in listed(server), "the end of probation")
        for _ in range(2 * FAILURES):
            assert ask(server, "Infinity").status_code == 500
        assert ask(server, 1).json()["package"] == second
        assert state_of(server) == "settled"


@pytest.mark.accept
def test_while_a_deployment_is_under_way_the_former_model_answers_and_the_files_follow(folder: Path) -> None:
    good, bad = make_package(folder / "good", inputs=INPUTS), make_package(folder / "bad", inputs=INPUTS, picky=True)
    with serving(folder, NOWHERE, workers=2) as server:
        first, second = swap(server, good, bad)
        with DeploymentHistory(server.deployment).locked():
            for _ in range(2 * FAILURES):
                ask(server, "Infinity")
            wait(lambda: any("not undone yet" in line["event"] for line in server.lines()), "the log")
            assert Deployment.loads(server.deployment.read_bytes()).digest == second
            wait(lambda: everywhere(server, lambda model: model["probation"]["refused"]), "both workers")
            assert f"{FAILURES} of {FAILURES} predictions failed" in listed(server)["probation"]["refused"]
            assert ask(server, 1).json()["package"] == first
        undone(server, first, second)


def test_a_model_whose_contract_is_gone_is_not_gone_back_to(folder: Path, redis_url: str) -> None:
    changed = contract_of(PUNCTUALITY, EVERYTHING, request=(Column("distance", Float64),))
    with serving(folder, redis_url) as server:
        server.deploy(make_package(folder / "first"))
        wait(lambda: bool(listed(server)), "the first model")
        write_atomically(server.contract, changed.dumps())
        wait(lambda: listed(server)["outdated"] is not None, "the other contract")
        inputs = [("distance", Float64)]
        second = make_package(folder / "second", changed, inputs=inputs, picky=True)
        server.deploy(second, changed, probation=HOUR_SECONDS, at=clock.now())
        wait(lambda: listed(server)["package"] == package_digest(second), "the second model")

        def predict(distance: float | str) -> httpx.Response:
            return server.predict(request={"distance": [distance]})

        for _ in range(2 * FAILURES):
            assert predict("Infinity").status_code == 500
        assert predict(1).json()["package"] == package_digest(second)
        assert "request field carrier is gone" in listed(server)["probation"]["problem"]
        assert state_of(server) == "no_way_back"
        problems = [line["problem"] for line in server.lines() if line["event"] == "deployment cannot be undone"]
        assert problems == [listed(server)["probation"]["problem"]]
