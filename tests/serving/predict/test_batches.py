"""Predictions at the same time: batches of a slow model, and what goes on beside a large request."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.profiles import BATCH_ROWS, ServingProfile
from isthmus.features.values.columns import Values
from isthmus.serving.limits import Limits
from isthmus.serving.predict.batches import QUICK_ROWS, QUICK_SECONDS, Batches, Columns, Outputs
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.rollout.releases import deploy
from tests.serving.support import CONTRACT, NOW, TABLES, Server, make_package, serving, verdict_of, wait

SLOW_BALLAST = 32
"""A model with it takes milliseconds for a row."""
SLOW = 2 * QUICK_SECONDS


class Doubling:
    """A model that doubles its input, that notes its batches, and that refuses negative numbers."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.threads: set[int] = set()
        self.may_run = threading.Event()
        self.may_run.set()

    def predict(self, columns: Columns) -> Outputs:
        self.may_run.wait(10)
        self.batches.append(columns["x"].data.tolist())
        self.threads.add(threading.get_ident())
        if (columns["x"].data < 0).any():
            raise ValueError("negative")
        return np.asarray(columns["x"].data * 2, np.float32)


def column(*numbers: float) -> Columns:
    return {"x": Values(np.array(numbers, np.float32), np.ones(len(numbers), bool))}


def test_what_waits_for_a_slow_model_is_its_next_batch() -> None:
    model = Doubling()

    async def ask() -> list[Outputs]:
        batches = Batches(model.predict, SLOW)
        model.may_run.clear()
        first = asyncio.create_task(batches.predict(column(0), 1))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(batches.predict(column(n, n), 2)) for n in (1, 2, 3)]
        await asyncio.sleep(0.05)
        model.may_run.set()
        outputs = await asyncio.gather(first, *others)
        outputs.append(await batches.predict(column(9), 1))
        return outputs

    outputs = asyncio.run(ask())
    assert [part.tolist() for part in outputs] == [[0], [2, 2], [4, 4], [6, 6], [18]]
    assert model.batches == [[0], [1, 1, 2, 2, 3, 3], [9]]
    assert threading.get_ident() not in model.threads


def test_a_batch_has_no_more_rows_than_it_may() -> None:
    model = Doubling()

    async def ask() -> None:
        batches = Batches(model.predict, SLOW, 3)
        model.may_run.clear()
        asked = [asyncio.create_task(batches.predict(column(*[n] * n), n)) for n in (1, 2, 1, 1, 4)]
        await asyncio.sleep(0.05)
        model.may_run.set()
        await asyncio.gather(*asked)

    asyncio.run(ask())
    assert sorted(map(len, model.batches)) == [2, 3, 4]


def test_a_quick_model_runs_where_it_is_asked() -> None:
    model = Doubling()

    async def ask() -> None:
        batches = Batches(model.predict, QUICK_SECONDS / 2)
        await asyncio.gather(*(batches.predict(column(n), 1) for n in (1, 2)))

    asyncio.run(ask())
    assert model.batches == [[1], [2]]
    assert model.threads == {threading.get_ident()}


def test_nobody_fails_for_the_rows_of_another() -> None:
    model = Doubling()

    async def ask() -> list[Any]:
        batches = Batches(model.predict, SLOW)
        asked = [batches.predict(column(n), 1) for n in (1, -1, 2)]
        return await asyncio.gather(*asked, return_exceptions=True)

    one, failed, two = asyncio.run(ask())
    assert (one.tolist(), two.tolist()) == ([2], [4])
    assert isinstance(failed, ValueError)


def test_who_has_left_does_not_stop_the_others() -> None:
    model = Doubling()

    async def ask() -> Outputs:
        batches = Batches(model.predict, SLOW)
        model.may_run.clear()
        left = asyncio.create_task(batches.predict(column(1), 1))
        stayed = asyncio.create_task(batches.predict(column(2), 1))
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.sleep(0)
        model.may_run.set()
        return await stayed

    assert asyncio.run(ask()).tolist() == [4]


@given(sizes=st.lists(st.integers(1, BATCH_ROWS + 5), min_size=1, max_size=12))
def test_everyone_gets_the_outputs_of_his_own_rows(sizes: list[int]) -> None:
    model = Doubling()

    async def ask() -> list[Outputs]:
        batches = Batches(model.predict, SLOW)
        starts = np.cumsum([0, *sizes]).tolist()
        asked = [column(*range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
        return await asyncio.gather(
            *(batches.predict(columns, size) for columns, size in zip(asked, sizes, strict=True))
        )

    outputs = asyncio.run(ask())
    assert [len(part) for part in outputs] == sizes
    assert np.concatenate(outputs).tolist() == [2 * n for n in range(sum(sizes))]
    assert all(len(batch) <= max(BATCH_ROWS, *sizes) for batch in model.batches)


@pytest.mark.parametrize("seconds", [QUICK_SECONDS / 2, SLOW])
def test_a_large_request_holds_up_no_small_one(seconds: float) -> None:
    answered = threading.Event()

    def predict(columns: Columns) -> Outputs:
        if len(columns["x"].data) > 1:
            assert answered.wait(10), "the small request was not answered first"
        return np.asarray(columns["x"].data, np.float32)

    async def ask() -> Outputs:
        batches = Batches(predict, seconds)
        rows = max(QUICK_ROWS, BATCH_ROWS) + 1
        large = asyncio.create_task(batches.predict(column(*range(rows)), rows))
        await asyncio.sleep(0)
        assert (await batches.predict(column(7), 1)).tolist() == [7]
        answered.set()
        return await large

    assert len(asyncio.run(ask())) > 1


def seconds(package: Path, file: Path) -> float:
    done = deploy(package, verdict_of(package), CONTRACT, ServingProfile(), file, tables=TABLES, at=NOW)
    return DeployedModel(done.deployment).seconds


def test_a_model_knows_how_slow_it_is(tmp_path: Path) -> None:
    quick = seconds(make_package(tmp_path / "quick"), tmp_path / "deployment.json")
    slow = seconds(make_package(tmp_path / "slow", ballast=SLOW_BALLAST), tmp_path / "deployment.json")
    assert 0 < quick < slow


@contextmanager
def predicting(folder: Path, redis_url: str, ballast: int) -> Iterator[Server]:
    """A server with a model that has ballast."""
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(folder / "package", ballast=ballast)
    with serving(folder, redis_url, limits=Limits(deadline_seconds=60)) as server:
        server.deploy(package)
        wait(lambda: server.http.get("/readyz").json().get("model") == "late", "the model")
        yield server


def test_small_requests_are_answered_during_a_large_one(tmp_path: Path, redis_url: str) -> None:
    rows = 10_000
    large = {"entities": {"carrier": ["B6"] * rows}, "request": {"distance": [-7.0] * rows}}
    small = {"features": ["punctuality:flights"], "entities": {"carrier": ["B6"]}}
    during = 0
    with predicting(tmp_path, redis_url, ballast=2) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.predict, **large)
        while not answer.done():
            assert server.lookup(**small).status_code == 200
            during += 1
        assert answer.result().json()["predictions"] == [0.5] * rows
    # On the event loop, the large request would let one or two pass, between its lookup and its prediction.
    assert during > 20


def test_predictions_at_the_same_time_are_each_ones_own(tmp_path: Path, redis_url: str) -> None:
    distances = [n - 20 for n in range(30)]
    with predicting(tmp_path, redis_url, SLOW_BALLAST) as server, ThreadPoolExecutor(8) as pool:

        def ask(distance: int) -> float:
            asked = {"entities": {"carrier": ["B6"]}, "request": {"distance": [distance]}}
            prediction: float = server.http.post("/predict", json=asked).json()["predictions"][0]
            return prediction

        found = list(pool.map(ask, distances))
    assert found == pytest.approx([1 / (1 + np.exp(-(7.0 + distance))) for distance in distances], abs=1e-6)
