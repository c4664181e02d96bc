"""A server over a cluster answers what it answers over one Redis, also while slots move and after a node is gone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from isthmus.features.entitykey import entity_key
from isthmus.features.errors import DependencyError
from isthmus.features.online import LookupPlan, OnlineStore, connect
from isthmus.features.types import Int32
from isthmus.serving.limits import Limits
from isthmus.serving.store import Store
from tests.servers import redis_cluster
from tests.serving.support import CARRIER, CONTRACT, FLIGHT, NOW, fill, serving, write

PASSWORD = "never-to-be-shown"  # noqa: S105
SECURED = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
PLAN = LookupPlan(CONTRACT, ["punctuality", "route"])
FLIGHTS = 300
KEYS: dict[str, list[Any]] = {"carrier": ["UA"] * FLIGHTS, "flight": list(range(FLIGHTS))}


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster"), *SECURED, password=PASSWORD) as running:
        yield running


@pytest.fixture
def url(ports: list[int]) -> str:
    found = f"redis+cluster://:{PASSWORD}@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    fill(found)
    with connect(found) as client:
        write(OnlineStore(client, CONTRACT), CONTRACT.view("route"), KEYS, [NOW] * FLIGHTS, flights=range(FLIGHTS))
    return found


async def _flights(store: Store) -> list[int | None]:
    return (await store.read(PLAN, KEYS, FLIGHTS, NOW))["route"].columns["flights"].tolist(Int32)


def test_a_lookup_is_that_of_one_server(tmp_path: Path, url: str, ports: list[int]) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, url) as server:
        assert server.http.get("/readyz").status_code == 200
        for _ in range(3):
            found = server.lookup(features=["punctuality:late_rate", "route:flights"], entities=KEYS).json()
            values = dict(zip(found["metadata"]["feature_names"], found["results"], strict=True))
            assert values["flights"]["values"] == list(range(FLIGHTS))
            assert values["late_rate"]["values"] == pytest.approx([0.1] * FLIGHTS)
    assert PASSWORD not in server.log.read_text()


def test_reads_follow_a_slot_that_moves(url: str, ports: list[int]) -> None:
    clients = [redis.Redis(port=port, password=PASSWORD) for port in ports]

    def tell(node: int, *command: Any) -> Any:
        return clients[node].execute_command(*command)  # type: ignore[no-untyped-call]

    names = [str(tell(n, "CLUSTER MYID"), "ascii") for n in range(3)]
    key = entity_key(CONTRACT.project, [(CARRIER, "UA"), (FLIGHT, 7)])
    slot = key_slot(key)
    source, target = slot % 3, (slot + 1) % 3

    async def check() -> None:
        store = Store(url, Limits())
        try:
            assert await _flights(store) == list(range(FLIGHTS))
            tell(target, "CLUSTER SETSLOT", slot, "IMPORTING", names[source])
            tell(source, "CLUSTER SETSLOT", slot, "MIGRATING", names[target])
            tell(source, "MIGRATE", "127.0.0.1", ports[target], key, 0, 5000, "AUTH", PASSWORD)
            assert await _flights(store) == list(range(FLIGHTS))
            for node in (target, 0, 1, 2):
                tell(node, "CLUSTER SETSLOT", slot, "NODE", names[target])
            many = await asyncio.gather(*(_flights(store) for _ in range(20)))
            assert all(one == list(range(FLIGHTS)) for one in many)
        finally:
            await store.close()

    asyncio.run(check())
    for client in clients:
        client.close()


def test_canceled_requests_leave_no_replies_behind(url: str) -> None:
    async def check() -> None:
        store = Store(url, Limits())
        try:
            for n in range(60):
                task = asyncio.create_task(_flights(store))
                await asyncio.sleep(n * 0.0001)
                task.cancel()
                some: dict[str, list[Any]] = {"carrier": ["UA", "nobody", "AA"], "flight": [n, 1, 1]}
                found = (await store.read(PLAN, some, 3, NOW))["route"].columns["flights"].tolist(Int32)
                assert found == [n, None, 4]
        finally:
            await store.close()

    asyncio.run(check())


def test_a_node_that_is_gone(tmp_path: Path) -> None:
    with redis_cluster(tmp_path, *SECURED, password=PASSWORD) as mortal:
        url = f"redis+cluster://:{PASSWORD}@" + ",".join(f"127.0.0.1:{port}" for port in mortal)
        fill(url)

        async def check() -> None:
            store = Store(url, Limits())
            try:
                await store.ping()
                with redis.Redis(port=mortal[1], password=PASSWORD, retry=Retry(NoBackoff(), 0)) as second:
                    second.shutdown(nosave=True)
                for attempt in (store.ping(), _flights(store), _flights(store)):
                    with pytest.raises(DependencyError, match="does not answer") as caught:
                        await attempt
                    assert PASSWORD not in str(caught.value)
                # Keys of the other nodes are still answered.
                carriers = [name for name in ("UA", "AA", "B6", "OO", "EX") if _node(name) != 1]
                plan = LookupPlan(CONTRACT, ["punctuality"])
                answer = await store.read(plan, {"carrier": carriers}, len(carriers), NOW)
                assert answer["punctuality"].event.all()
            finally:
                await store.close()

        asyncio.run(check())


def _node(carrier: str) -> int:
    return key_slot(entity_key(CONTRACT.project, [(CARRIER, carrier)])) % 3


def test_no_cluster_at_all() -> None:
    async def check() -> None:
        store = Store(f"redis+cluster://:{PASSWORD}@127.0.0.1:1,127.0.0.1:2", Limits())
        with pytest.raises(DependencyError, match="does not answer") as caught:
            await store.ping()
        assert PASSWORD not in str(caught.value)
        await store.close()

    asyncio.run(check())
