import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.features.contract.generations import Generations, Retired
from isthmus.features.contract.schema import Contract
from isthmus.features.files import write_atomically
from isthmus.features.types import Int64
from isthmus.package.manifest import package_digest
from isthmus.serving.watch import Watch
from isthmus.serving.wire.errors import NotFoundError
from tests.serving.support import (
    CONTRACT,
    EVERYTHING,
    HOUR,
    LISTS,
    NOW,
    PUNCTUALITY,
    ROUTE,
    contract_of,
    make_package,
    serving,
    wait,
)

OTHER = contract_of(PUNCTUALITY, EVERYTHING, ROUTE, request=())
ASKED: dict[str, Any] = {"features": ["punctuality:flights"], "entities": {"carrier": ["B6"]}}


def _known(current: Path) -> bool:
    return any(LISTS.name in contract.views for contract in Generations.read(current).contracts())


def _watched(current: Path) -> bool:
    watch = Watch(current, current.with_name("deployment.json"))
    watch.load()
    with pytest.raises(NotFoundError) as refused:
        watch.state.lookup((f"{LISTS.name}:{LISTS.fields[0].name}",), False)
    return "to make it current" in str(refused.value)


@pytest.mark.parametrize("known", [_known, _watched])
def test_a_switch_while_the_contracts_are_read_hides_none(tmp_path: Path, known: Callable[[Path], bool]) -> None:
    """The file of the current contract is a pipe: until the switch is over, whoever has opened it has read nothing."""
    current, before = tmp_path / "contract.json", Generations().switch(OTHER, NOW)
    before.prepare(CONTRACT, NOW).write(current)
    current.unlink()
    os.mkfifo(current)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(known, current)
        with current.open("wb") as pipe:
            before.switch(CONTRACT, NOW).write(current)
            pipe.write(OTHER.dumps())
        assert reading.result(30)


@pytest.mark.accept
@pytest.mark.slowest
def test_contracts_may_be_read_while_they_change_again_and_again(tmp_path: Path) -> None:
    current, stop = tmp_path / "contract.json", threading.Event()
    generations = Generations().switch(CONTRACT, NOW)
    generations.write(current)

    def change() -> None:
        after = generations
        for contract in [OTHER, CONTRACT] * 200:
            after.prepare(contract, NOW).write(current)
            after = after.switch(contract, NOW)
            after.write(current)
            if stop.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            while not changing.done():
                assert Generations.read(current).current is not None
        finally:
            stop.set()
        changing.result()


def test_contract_and_deployment_are_taken_up_while_the_server_runs(tmp_path: Path, redis_url: str) -> None:
    inputs = [("punctuality__flights", Int64)]
    first = make_package(tmp_path / "first", inputs=inputs, weight=0.1)
    second = make_package(tmp_path / "second", inputs=inputs, weight=-0.1)
    third = make_package(tmp_path / "third", OTHER, inputs=inputs)
    with serving(tmp_path / "server", redis_url) as server:
        assert server.http.get("/healthz").json() == {"status": "up"}
        ready = server.http.get("/readyz")
        assert ready.status_code == 503
        assert ready.headers["retry-after"] == "1"
        assert "isthmus apply" in ready.json()["remedy"]
        assert server.lookup(**ASKED).status_code == 503
        assert server.http.get("/models").json() == {"models": [], "refused": None}

        write_atomically(server.contract, b"{")
        wait(lambda: "is not a contract" in server.http.get("/readyz").json()["found"], "the broken contract")
        write_atomically(server.contract, CONTRACT.dumps())
        wait(lambda: server.http.get("/readyz").status_code == 200, "the contract")
        assert server.http.get("/readyz").json() == {
            "status": "ready", "project": "flights", "contract": CONTRACT.hash, "model": None,
        }  # fmt: skip
        assert server.lookup(**ASKED).json()["results"][1]["values"] == [7]
        missing = server.predict(entities={"carrier": ["B6"]})
        assert (missing.status_code, missing.json()["error"]) == (503, "NotReadyError")
        assert "isthmus deploy" in missing.json()["remedy"]

        def predicted() -> float:
            answer = server.predict(entities={"carrier": ["B6"]})
            return float(answer.json()["predictions"][0]) if answer.status_code == 200 else -1.0

        server.deploy(first)
        wait(lambda: predicted() > 0.6, "the first model")
        server.deploy(second)
        wait(lambda: 0 < predicted() < 0.4, "the second model")

        write_atomically(server.deployment, b"{}")
        write_atomically(server.contract, CONTRACT.dumps()[:-3])
        wait(lambda: sum(line["event"] == "file refused" for line in server.lines()) == 3, "both refusals in the log")
        assert predicted() < 0.4
        listed = server.http.get("/models").json()
        assert "is not a deployment" in listed["refused"]
        assert len(listed["models"]) == 1
        assert server.lookup(**ASKED).headers["isthmus-contract"] == CONTRACT.hash

        write_atomically(server.contract, OTHER.dumps())
        wait(lambda: server.http.get("/readyz").json()["contract"] == OTHER.hash, "the other contract")
        assert server.lookup(**ASKED).json()["metadata"]["contract"] == OTHER.hash
        old = server.predict(entities={"carrier": ["B6"]})
        assert (old.status_code, old.json()["error"]) == (409, "ContractMismatch")
        assert "request field distance is gone" in old.json()["found"]
        (listed,) = server.http.get("/models").json()["models"]
        assert (listed["current"], listed["contract"]) == (False, CONTRACT.hash)
        assert "request field distance is gone" in listed["outdated"]
        server.deploy(third, OTHER)
        wait(lambda: predicted() > 0.9, "the third model")

        server.deployment.unlink()
        wait(lambda: server.predict(entities={"carrier": ["B6"]}).status_code == 503, "the model to be gone")
        assert server.http.get("/v2/health/ready").status_code == 200
        write_atomically(server.deployment, b'{"model": "\xff"}')
        wait(lambda: server.http.get("/v2/health/ready").status_code == 503, "the deployment that cannot be loaded")
        assert server.http.get("/readyz").status_code == 200, "lookups can be answered"


def test_a_change_is_taken_up_at_once(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "contract.json", tmp_path / "deployment.json")
    contracts = [CONTRACT, OTHER]

    async def took() -> list[float]:
        following = asyncio.create_task(watch.run())
        seconds = []
        for turn in range(6):
            # It sleeps from here: whatever its pause is, all of it passes.
            await asyncio.sleep(0)
            write_atomically(tmp_path / "contract.json", contracts[turn % 2].dumps())
            began, before = time.perf_counter(), watch.state
            async with asyncio.timeout(15):
                while watch.state is before:
                    await asyncio.sleep(0.001)
            seconds.append(time.perf_counter() - began)
        following.cancel()
        return seconds

    # The fastest: a busy machine may hold up any but not all of them.
    assert min(asyncio.run(took())) < 0.05


def test_no_request_fails_while_packages_are_swapped(tmp_path: Path, redis_url: str) -> None:
    inputs = [("punctuality__flights", Int64)]
    packages = [make_package(tmp_path / f"{weight}", inputs=inputs, weight=weight) for weight in (0.1, -0.1)]
    digests = [package_digest(package) for package in packages]
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "contract.json").write_bytes(CONTRACT.dumps())
    ended = threading.Event()

    told: tuple[list[httpx.Response], ...] = ([], [])

    def ask(url: httpx.URL, answers: list[httpx.Response]) -> None:
        with httpx.Client(base_url=url, timeout=10) as http:
            while not ended.is_set():
                answers.append(http.post("/predict", json={"entities": {"carrier": ["B6"]}}))

    with serving(tmp_path / "server", redis_url) as server, ThreadPoolExecutor(2) as threads:

        def swap(turn: int) -> None:
            server.deploy(packages[turn % 2])
            models = server.http.get
            wait(lambda: [one["package"] for one in models("/models").json()["models"]] == [digests[turn % 2]], "it")

        def answer() -> None:
            # The second answer from now on is to a request that was sent after now.
            enough = [len(answers) + 2 for answers in told]
            wait(lambda: all(len(answers) >= many for answers, many in zip(told, enough, strict=True)), "answers")

        swap(0)
        asking = [threads.submit(ask, server.http.base_url, answers) for answers in told]
        try:
            answer()
            for turn in range(1, 5):
                swap(turn)
                answer()
        finally:
            ended.set()
        for asked in asking:
            asked.result()
    for answers in told:
        assert {answer.status_code for answer in answers} == {200}
        turns = [digests.index(answer.json()["package"]) for answer in answers]
        assert [turns[0], *(now for before, now in pairwise(turns) if now != before)] == [0, 1, 0, 1, 0]
        sevens = [round(answer.json()["predictions"][0], 4) for answer in answers]
        assert sevens == [(0.6682, 0.3318)[turn] for turn in turns], "flights are 7: sigmoid(0.7), sigmoid(-0.7)"


def test_rows_of_another_contract_are_refused(tmp_path: Path, redis_url: str) -> None:
    changed = contract_of(replace(PUNCTUALITY, code="other code"), EVERYTHING, ROUTE)
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url) as server:
        assert server.lookup(**ASKED).status_code == 200
        # Both in one slot, as nothing of ours leaves them.
        Generations(changed, None, (Retired(CONTRACT, NOW),)).write(server.contract)
        wait(lambda: server.http.get("/readyz").json()["contract"] == changed.hash, "the other contract")
        answer = server.lookup(**ASKED)
        assert (answer.status_code, answer.json()["error"]) == (409, "ContractMismatch")
        assert answer.json()["found"].endswith(" (its code changed)")
        assert "isthmus materialize" in answer.json()["remedy"]
        assert server.lookup(features=["everything:b"], entities={"flight": [1]}).status_code == 200


def test_a_model_goes_on_until_what_it_reads_changes(tmp_path: Path, redis_url: str) -> None:
    before = contract_of(PUNCTUALITY, EVERYTHING)
    more = contract_of(PUNCTUALITY, EVERYTHING, ROUTE)
    less = contract_of(PUNCTUALITY)
    otherwise = contract_of(PUNCTUALITY, replace(EVERYTHING, ttl=1, code="other code"))
    expired = contract_of(replace(PUNCTUALITY, ttl=HOUR), EVERYTHING)
    asked = {"entities": {"carrier": ["UA", "B6", "OO", "nobody"]}, "request": {"distance": [1, None, -2, 0]}}
    with serving(tmp_path / "server", redis_url) as server:

        def take_up(contract: Contract) -> None:
            write_atomically(server.contract, contract.dumps())
            ready = server.http.get
            wait(lambda: ready("/readyz").json().get("contract") == contract.hash, "the contract")

        take_up(before)
        server.deploy(make_package(tmp_path / "package", before), before)
        wait(lambda: server.http.get("/models").json()["models"], "the model")
        first = server.predict(**asked)
        assert first.status_code == 200
        for contract in (more, less, otherwise, before):
            take_up(contract)
            answer = server.predict(**asked)
            assert (answer.status_code, answer.content) == (200, first.content)
            assert answer.headers["isthmus-contract"] == contract.hash
            (listed,) = server.http.get("/models").json()["models"]
            assert (listed["current"], listed["outdated"], listed["contract"]) == (True, None, before.hash)
        take_up(expired)
        refused = server.predict(**asked)
        assert (refused.status_code, refused.json()["error"]) == (409, "ContractMismatch")
        assert "(view punctuality: ttl was 1 day, is 1 hour)" in refused.json()["found"]
        assert server.predict(**asked).json() == refused.json()
        (listed,) = server.http.get("/models").json()["models"]
        assert "view punctuality: ttl was 1 day, is 1 hour" in listed["outdated"]
        assert "ttl was 1 day" in next(line["problem"] for line in server.lines() if line["event"] == "model refused")
        unchanged = server.lookup(features=["everything:b"], entities={"flight": [1]})
        assert unchanged.status_code == 200, "lookups of other views go on"
        changed = server.lookup(**ASKED)
        assert changed.status_code == 409, "the rows of the view are of another contract, too"
        found = f"written under contract {PUNCTUALITY.prefix.hex()} (ttl was 1 day, is 1 hour)"
        assert (changed.json()["where"], changed.json()["found"]) == ("online rows of view punctuality", found)
        take_up(before)
        assert server.predict(**asked).content == first.content
        assert server.process.poll() is None


def test_what_changed_is_told_to_those_who_may_ask_the_model(tmp_path: Path, redis_url: str) -> None:
    with serving(tmp_path / "server", redis_url) as server:
        headers = {
            name: {"authorization": key} for name, key in server.grant(may="predict:late", not_="push:x").items()
        }
        write_atomically(server.contract, contract_of(replace(PUNCTUALITY, ttl=HOUR)).dumps())
        server.deploy(make_package(tmp_path / "package"))
        asked = {"entities": {"carrier": ["UA"]}, "request": {"distance": [1]}}

        def status(name: str) -> int:
            return server.http.post("/predict", json=asked, headers=headers[name]).status_code

        wait(lambda: status("may") != 503, "the model")
        assert (status("may"), status("not_")) == (409, 403)
