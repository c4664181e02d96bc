"""The server goes by the stamp of a view: for what it answers, and for which pushes win."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.online.plan import LookupPlan
from isthmus.features.online.record import Published, Stamp
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.features.types import Int32
from isthmus.features.values.columns import from_python
from isthmus.features.values.entitykey import KeyValue, entity_key
from isthmus.features.values.rows import RowCodec
from isthmus.serving.limits import Limits
from isthmus.serving.redis.node import RedisNode
from isthmus.serving.redis.store import FRESH_SECONDS, Stamps, Store
from tests.serving.support import CARRIER, CONTRACT, FLIGHT, NOW, ROUTE

KEY: list[tuple[Column, KeyValue]] = [(CARRIER, "UA"), (FLIGHT, 1 << 50)]
KEYS: dict[str, list[Any]] = {"carrier": ["UA"], "flight": [1 << 50]}


@pytest.fixture(autouse=True)
def _nothing_left(redis_url: str) -> Iterator[None]:
    yield
    with connect(redis_url) as client:
        client.delete(f"{CONTRACT.project}:tables", f"{CONTRACT.project}:tables|route|suspects")
        client.delete(entity_key(CONTRACT.project, KEY))


def _publish(url: str, stamp: Stamp, view: ViewContract = ROUTE) -> None:
    with connect(url) as client:
        record = Published(
            contract=view.hash, version=0, fingerprint="", built=0, at=0, horizon=0, servers={}, stamp=stamp
        )
        store = OnlineStore(client, CONTRACT)
        assert store.replace(view, store.record_text(view), msgspec.json.encode(record))


async def _push(store: Store, time: int, value: int) -> int:
    at = np.array([time], np.int64)
    rows = RowCodec(ROUTE).encode(at, at, {"flights": from_python([value], Int32)})
    return await store.write(CONTRACT.project, ROUTE, [entity_key(CONTRACT.project, KEY)], rows)


async def _answer(store: Store) -> tuple[int, int | None]:
    found = (await store.read(LookupPlan(CONTRACT, ["route"]), KEYS, 1, NOW + 100))["route"]
    return int(found.event[0]), found.columns["flights"].tolist(Int32)[0]


def test_answers_and_pushes_go_by_the_stamp(redis_url: str) -> None:
    async def check() -> None:
        store = Store(redis_url, Limits())
        try:
            assert await _push(store, NOW, 1) == 1
            assert await _answer(store) == (NOW, 1)
            _publish(redis_url, Stamp(NOW, NOW + 50, NOW + 50))
            await asyncio.sleep(FRESH_SECONDS + 0.1)
            assert await _answer(store) == (NOW + 50, 1)
            # Newer than the row as it is stored, and older than the time that was told for it.
            assert await _push(store, NOW + 40, 2) == 0
            assert await _answer(store) == (NOW + 50, 1)
            assert await _push(store, NOW + 60, 3) == 1
            assert await _answer(store) == (NOW + 60, 3)
        finally:
            await store.close()

    asyncio.run(check())


def test_a_push_goes_by_no_stamp_of_another_contract(redis_url: str) -> None:
    async def check() -> None:
        store = Store(redis_url, Limits())
        _publish(redis_url, Stamp(NOW, NOW + 50, NOW + 50), replace(ROUTE, ttl=1))
        try:
            for time in (NOW - 1, NOW):
                assert await _push(store, time, 1) == 1
        finally:
            await store.close()

    asyncio.run(check())


def test_a_stamp_counts_from_the_moment_its_contract_does(redis_url: str) -> None:
    before = replace(CONTRACT, views={**CONTRACT.views, "route": replace(ROUTE, ttl=1)})
    stamp = Stamp(NOW, NOW + 50, NOW + 50)

    async def check() -> None:
        _publish(redis_url, stamp)
        node = RedisNode(redis_url)
        try:
            stamps = Stamps(node)
            assert await stamps.of(before) == {}
            assert await stamps.of(CONTRACT) == {"route": stamp}
        finally:
            await node.close()

    asyncio.run(check())
