"""A training set as served: what the log of materializations says was readable at each moment, and nothing else."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.clock import Status
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.offline.history import ViewHistory, status_column
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online import record as published
from isthmus.features.online.store import OnlineStore
from isthmus.features.pointintime.served import ServedDifference, ServedJoin
from isthmus.features.publishing.collect import collect
from isthmus.features.publishing.publish import publish
from isthmus.features.redis.pipeline import Client
from isthmus.features.types import Int64
from tests.features.publishing.test_publish import VIEW, Row, World, after, key_of, order_of

LIMITED = replace(VIEW, ttl=25)


def _spine(questions: list[tuple[int, int]]) -> pa.Table:
    keys = [key_of(key) for key, _ in questions]
    times = pa.array([at for _, at in questions], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return pa.table({"event_timestamp": times, "k": pa.array([k for k, _ in keys], pa.string()),
                     "n": pa.array([n for _, n in keys], pa.int64())})  # fmt: skip


def as_served(
    spine: pa.Table, offline: OfflineStore, histories: list[ViewHistory]
) -> tuple[pa.Table, dict[str, dict[str, ServedDifference]]]:
    join = ServedJoin(spine.schema, offline, histories)
    table = pa.Table.from_batches(join.batches(spine.to_batches(max_chunksize=5)), join.schema)
    return table, join.report()


def _answer(runs: list[tuple[int, dict[int, Row]]], key: int, at: int) -> tuple[str, int | None]:
    """What a caller saw: the rows of the last run that had ended."""
    rows: dict[int, Row] = next((state for readable, state in reversed(runs) if readable <= at), {})
    if key not in rows:
        return "not_found", None
    event, _, value = rows[key]
    return ("expired", None) if LIMITED.ttl is not None and at - event > LIMITED.ttl else ("present", value)


@pytest.mark.accept
@given(
    first=st.sets(st.integers(0, 5), min_size=1),
    steps=st.lists(
        st.tuples(st.sampled_from(["restamp all", "change", "correct", "drop", "rewind", "nothing"]),
                  st.integers(0, 5), st.integers(1, 9), st.booleans()),
        max_size=5,
    ),
    questions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90)), min_size=1, max_size=12),
)  # fmt: skip
def test_it_is_what_callers_saw(
    client: Client, first: set[int], steps: list[tuple[str, int, int, bool]], questions: list[tuple[int, int]]
) -> None:
    url = f"unix://{client.connection_pool.connection_kwargs['path']}"  # type: ignore[union-attr]
    with TemporaryDirectory() as folder:
        world = World(Path(folder), url, client, LIMITED)
        world.write({key: [(1, 2, key)] for key in first})
        runs: list[tuple[int, dict[int, Row]]] = []
        for n, (what, key, value, run) in enumerate([("nothing", 0, 1, True), *steps]):
            world.now = 10 * (n + 1)
            table = after(world.table, what, key, value, world.now - 1)
            if table != world.table:
                world.write(table)
            if run:
                world.publish()
                runs.append((world.now, {k: max(rows, key=order_of) for k, rows in world.table.items()}))
        spine = _spine(questions)
        found, report = as_served(spine, world.offline, [world.offline.history(LIMITED)])
        assert found.select(spine.column_names).equals(spine)
        expected = [_answer(runs, key, at) for key, at in questions]
        values = found[LIMITED.full_name("a")].to_pylist()
        assert list(zip(found[status_column(LIMITED)].to_pylist(), values, strict=True)) == expected
        assert report[LIMITED.name]["a"].compared == len(questions)


@given(
    first=st.sets(st.integers(0, 5), min_size=1),
    steps=st.lists(
        st.tuples(st.sampled_from(["restamp all", "restamp all", "restamp some", "change", "correct", "drop", "rewind",
                                   "nothing", "push", "collected", "collected", "full", "forget",
                                   "death"]),
                  st.integers(0, 5), st.integers(1, 9), st.integers(0, 6), st.booleans()),
        max_size=6,
    ),
)  # fmt: skip
def test_it_is_what_redis_answered(
    client: Client, first: set[int], steps: list[tuple[str, int, int, int, bool]]
) -> None:
    """Redis is asked for every key at every moment.

    Keys that were pushed for the online store alone are left out from then on; not those whose history has the row.
    """
    url = f"unix://{client.connection_pool.connection_kwargs['path']}"  # type: ignore[union-attr]
    seen: dict[tuple[int, int], tuple[str, int | None]] = {}
    with TemporaryDirectory() as folder:
        world = World(Path(folder), url, client, LIMITED)
        world.write({key: [(1, 2, key)] for key in first})
        pushed: set[int] = set()
        waits = False
        for n, (what, key, value, lag, run) in enumerate([("nothing", 0, 1, 0, True), *steps]):
            world.now = 10 * (n + 1)
            table = after(world.table, what, key, value, world.now - 1 - lag)
            if table != world.table:
                world.write(table)
            match what:
                case "push":
                    world.push(key, (world.now - value, world.now - lag, 500 + value))
                    pushed.add(key)
                case "collected":
                    world.push(key, (world.now - value, world.now, 500 + value), accepted=world.now)
                    waits = value % 2 == 0
                case "forget":
                    client.delete("prod:tables|traffic|suspects")
                    client.hset("prod:tables", "traffic", "")
                    run = True
                case "death":
                    # As every run does first.
                    collect(client, "prod", world.offline, LIMITED.table, [LIMITED])
                    _dies(world)
                    run = True
            if not waits or run or what == "full":
                collect(client, "prod", world.offline, LIMITED.table, [LIMITED])
                waits = False
            if run or what == "full":
                world.publish(full=what == "full")
            for at in range(world.now, world.now + 10):
                seen.update({(key, at): said for key, said in _said(world, at).items() if key not in pushed})
        collect(client, "prod", world.offline, LIMITED.table, [LIMITED])
        spine = _spine(list(seen))
        found, _ = as_served(spine, world.offline, [world.offline.history(LIMITED)])
        values = found[LIMITED.full_name("a")].to_pylist()
        told = zip(found[status_column(LIMITED)].to_pylist(), values, strict=True)
        assert dict(zip(seen, told, strict=True)) == seen


def _said(world: World, at: int) -> dict[int, tuple[str, int | None]]:
    """What every key answers."""
    named = [key_of(key) for key in range(6)]
    answer = world.store.read(LIMITED, {"k": [k for k, _ in named], "n": [n for _, n in named]}, at)
    values = answer.columns["a"].tolist(Int64)
    return {key: (Status(answer.status[key]).label, values[key]) for key in range(6)}


class _DiedError(Exception):
    """The process is not there any more."""


def _dies(world: World) -> None:
    """A run that ends just before it says that its rows are there."""

    class Dead(OnlineStore):
        def replace(self, view: ViewContract, told: bytes | None, record: bytes) -> bool:
            found = published.decode(record)
            if found is not None and not found.pending:
                raise _DiedError
            return super().replace(view, told, record)

    store = Dead(world.client, world.store.contract)
    with pytest.raises(_DiedError):
        publish(store, world.url, world.offline, world.offline.history(LIMITED), lambda: world.now)


def test_the_lag_is_told(tmp_path: Path, client: Client) -> None:
    url = f"unix://{client.connection_pool.connection_kwargs['path']}"  # type: ignore[union-attr]
    second = 1_000_000
    world = World(tmp_path, url, client)
    world.write({0: [(second, second, 1)]})
    world.now = 10 * second
    world.publish()
    world.write({0: [(second, second, 1), (11 * second, 11 * second, 2)]})
    world.now = 30 * second
    world.publish()
    spine = _spine([(0, 5 * second), (0, 10 * second), (0, 20 * second), (0, 30 * second)])
    found, report = as_served(spine, world.offline, [world.offline.history(VIEW)])
    assert found[VIEW.full_name("a")].to_pylist() == [None, 1, 1, 2]
    told = report[VIEW.name]["a"]
    # At 5 s nothing was readable; at 20 s a row ten seconds older than the one that could have been known.
    assert (told.compared, told.differing) == (4, 2)
    assert told.lag_seconds == pytest.approx((0 + 10 + 0) / 3)


def test_what_is_not_known_is_refused(tmp_path: Path, client: Client) -> None:
    url = f"unix://{client.connection_pool.connection_kwargs['path']}"  # type: ignore[union-attr]
    world = World(tmp_path, url, client)
    world.write({0: [(1, 1, 1)]})
    with pytest.raises(DataError, match="nothing was materialized"):
        as_served(_spine([(0, 1)]), world.offline, [world.offline.history(VIEW)])
    world.now = 10
    world.publish()
    for file in tmp_path.glob("traffic/**/*.parquet"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="traffic"):
        as_served(_spine([(0, 1)]), world.offline, [world.offline.history(VIEW)])
