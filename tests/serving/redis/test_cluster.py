"""A server over a cluster answers what it answers over one Redis, also while slots move and after a node is gone."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from isthmus.features.errors import DependencyError
from isthmus.features.online import pushes
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.features.types import Int32
from isthmus.features.values.columns import from_python
from isthmus.features.values.entitykey import entity_key
from isthmus.features.values.rows import RowCodec
from isthmus.serving.limits import Limits
from isthmus.serving.redis.store import Store
from tests.servers import NODES, owner, redis_cluster
from tests.serving.support import CARRIER, CONTRACT, FLIGHT, NOW, ROUTE, fill, serving, write

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


def test_a_key_of_another_type_fails_alone(url: str) -> None:
    name = entity_key("flights", [(CARRIER, "UA"), (FLIGHT, 7)])
    with connect(url) as client:
        client.delete(name)
        client.set(name, "x")

    async def read() -> ViewAnswer:
        store = Store(url, Limits())
        try:
            return (await store.read(PLAN, KEYS, FLIGHTS, NOW))["route"]
        finally:
            await store.close()

    try:
        answer = asyncio.run(read())
    finally:
        with connect(url) as client:
            client.delete(name)
    assert answer.foreign == {7: "string"}
    assert np.flatnonzero(answer.status).tolist() == [7]


def test_a_lookup_is_that_of_one_server(tmp_path: Path, url: str, ports: list[int]) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, url) as server:
        assert server.http.get("/readyz").status_code == 200
        for _ in range(3):
            found = server.lookup(features=["punctuality:late_rate", "route:flights"], entities=KEYS).json()
            values = dict(zip(found["metadata"]["feature_names"], found["results"], strict=True))
            assert values["flights"]["values"] == list(range(FLIGHTS))
            assert values["late_rate"]["values"] == pytest.approx([0.1] * FLIGHTS)
        # The records and the pushed keys of views lie on different nodes.
        assert "isthmus_ready 1.0" in server.http.get("/metrics").text.splitlines()
        assert server.http.get("/status").json()["views"].keys() == CONTRACT.views.keys()
    assert PASSWORD not in server.log.read_text()


@dataclass(frozen=True)
class Move:
    """A slot on its way from the node that has it to the next one."""

    ports: list[int]
    slot: int

    @property
    def source(self) -> int:
        return owner(self.slot)

    @property
    def target(self) -> int:
        return (self.source + 1) % NODES

    def tell(self, node: int, *command: Any) -> Any:
        with redis.Redis(port=self.ports[node], password=PASSWORD) as client:
            return client.execute_command(*command)

    def begin(self) -> None:
        names = [str(self.tell(n, "CLUSTER MYID"), "ascii") for n in range(3)]
        self.tell(self.target, "CLUSTER SETSLOT", self.slot, "IMPORTING", names[self.source])
        self.tell(self.source, "CLUSTER SETSLOT", self.slot, "MIGRATING", names[self.target])

    def send(self, *keys: bytes) -> None:
        place = "127.0.0.1", self.ports[self.target]
        self.tell(self.source, "MIGRATE", *place, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *keys)

    def end(self) -> None:
        name = str(self.tell(self.target, "CLUSTER MYID"), "ascii")
        for node in (self.target, 0, 1, 2):
            self.tell(node, "CLUSTER SETSLOT", self.slot, "NODE", name)


def test_reads_follow_a_slot_that_moves(url: str, ports: list[int]) -> None:
    key = entity_key(CONTRACT.project, [(CARRIER, "UA"), (FLIGHT, 7)])
    move = Move(ports, key_slot(key))

    async def check() -> None:
        store = Store(url, Limits())
        try:
            assert await _flights(store) == list(range(FLIGHTS))
            move.begin()
            move.send(key)
            assert await _flights(store) == list(range(FLIGHTS))
            move.end()
            many = await asyncio.gather(*(_flights(store) for _ in range(20)))
            assert all(one == list(range(FLIGHTS)) for one in many)
        finally:
            await store.close()

    asyncio.run(check())


def _together(slot: int, count: int) -> list[int]:
    """Flights of UA whose keys have a slot."""
    flights = (n for n in range(1 << 40, 1 << 41) if key_slot(_name(n)) == slot)
    return list(islice(flights, count))


def _name(flight: int) -> bytes:
    return entity_key(CONTRACT.project, [(CARRIER, "UA"), (FLIGHT, flight)])


async def _push(store: Store, number: int, flights: Sequence[int]) -> int:
    """Pushes a number as the value and the time of some flights."""
    event = np.full(len(flights), NOW + number, np.int64)
    rows = RowCodec(ROUTE).encode(event, event, {"flights": from_python([number] * len(flights), Int32)})
    return await store.write(CONTRACT.project, ROUTE, [_name(flight) for flight in flights], rows)


async def _pushed(store: Store, flights: Sequence[int]) -> list[int | None]:
    keys: dict[str, list[Any]] = {"carrier": ["UA"] * len(flights), "flight": list(flights)}
    answer = await store.read(LookupPlan(CONTRACT, ["route"]), keys, len(flights), 2 * NOW)
    return answer["route"].columns["flights"].tolist(Int32)


def test_pushes_follow_a_slot_that_moves(url: str, ports: list[int]) -> None:
    """One call of the script is for all keys of the slot, some of which are here, some there, and some nowhere yet."""
    flights, elsewhere = _together(5001, 9), list(range(40))
    move = Move(ports, 5001)

    async def check() -> None:
        store = Store(url, Limits())
        try:
            assert await _push(store, 1, flights[:6]) == 6
            move.begin()
            for number, ahead in ((2, []), (3, flights[:2]), (4, flights[2:6])):
                if ahead:
                    move.send(*map(_name, ahead))
                assert await _push(store, number, flights + elsewhere) == len(flights) + len(elsewhere)
                assert await _pushed(store, flights + elsewhere) == [number] * (len(flights) + len(elsewhere))
            move.end()
            assert await _push(store, 5, flights) == len(flights)
            assert await _push(store, 4, flights) == 0
            assert await _pushed(store, flights) == [5] * len(flights)
        finally:
            await store.close()

    asyncio.run(check())


@pytest.mark.accept
def test_no_push_is_lost_or_refused_while_a_slot_moves(url: str, ports: list[int]) -> None:
    flights = _together(6002, 40)
    move = Move(ports, 6002)

    steps: list[Callable[[], None]] = [move.begin, *(partial(move.send, _name(flight)) for flight in flights), move.end]

    async def check() -> None:
        store = Store(url, Limits())
        try:
            # Each step of the move meets a push on its way: neither waits for the other.
            for number, step in enumerate(steps):
                pushed, _ = await asyncio.gather(_push(store, number, flights), asyncio.to_thread(step))
                assert pushed == len(flights)
                assert await _pushed(store, flights) == [number] * len(flights)
        finally:
            await store.close()

    asyncio.run(check())
    with redis.Redis(port=ports[move.target], password=PASSWORD) as client:
        assert client.execute_command("CLUSTER COUNTKEYSINSLOT", 6002) == len(flights)


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
                # What a server goes by besides the rows lies on one node: a server that is ready has seen it.
                await store.ping(CONTRACT)
                carriers = [name for name in ("UA", "AA", "B6", "OO", "EX") if _node(name) != 1]
                plan = LookupPlan(CONTRACT, ["punctuality"])
                with redis.Redis(port=mortal[1], password=PASSWORD, retry=Retry(NoBackoff(), 0)) as second:
                    second.shutdown(nosave=True)
                for attempt in (store.ping(CONTRACT), _flights(store), _flights(store)):
                    with pytest.raises(DependencyError, match="does not answer") as caught:
                        await attempt
                    assert PASSWORD not in str(caught.value)
                # Keys of the other nodes are still answered.
                answer = await store.read(plan, {"carrier": carriers}, len(carriers), NOW)
                assert answer["punctuality"].event.all()
            finally:
                await store.close()

        asyncio.run(check())


def _node(carrier: str) -> int:
    return owner(key_slot(entity_key(CONTRACT.project, [(CARRIER, carrier)])))


def test_no_cluster_at_all() -> None:
    async def check() -> None:
        store = Store(f"redis+cluster://:{PASSWORD}@127.0.0.1:1,127.0.0.1:2", Limits())
        with pytest.raises(DependencyError, match="does not answer") as caught:
            await store.ping(CONTRACT)
        assert PASSWORD not in str(caught.value)
        await store.close()

    asyncio.run(check())


def test_the_rows_for_the_history_are_in_one_stream(url: str) -> None:
    view = CONTRACT.view("route")
    names = [entity_key("flights", [(CARRIER, "UA"), (FLIGHT, flight)]) for flight in KEYS["flight"]]
    values = {"flights": from_python(list(range(FLIGHTS)), Int32)}
    rows = RowCodec(view).encode(np.full(FLIGHTS, NOW), np.full(FLIGHTS, NOW), values)

    async def append() -> None:
        store = Store(url, Limits())
        try:
            await store.append("flights", view, names, rows, NOW, FLIGHTS)
            with pytest.raises(DependencyError, match="history of route: 300 pushed rows wait for it; 1 more"):
                await store.append("flights", view, names[:1], rows[:1], NOW, FLIGHTS)
        finally:
            await store.close()

    asyncio.run(append())
    with connect(url) as client:
        entries = pushes.waiting(client, "flights", "route", 2 * FLIGHTS)
        assert [(entry.name, entry.row, entry.accepted) for entry in entries] == [
            (name, row, NOW) for name, row in zip(names, rows, strict=True)
        ]
        assert pushes.trim(client, "flights", "route", entries[-2].place) == FLIGHTS - 2
        assert pushes.holds(client, "flights", "route", entries[-2].place)
        assert pushes.waiting(client, "flights", "route", 9, entries[-2].place) == entries[-1:]
