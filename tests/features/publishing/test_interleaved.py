"""Runs with pushes, deaths and losses between any two of their commands, and pushes with runs in their middle.

The oracle looks at what Redis answered before, and says what it has to answer after a run that nobody disturbed: it
knows no stamps, records or suspects. While a run is under way, a reader sees old rows, new ones, or pushed ones.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import DependencyError
from isthmus.features.online.scripts import suspects_key
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.publish import publish
from isthmus.features.redis.pipeline import Client
from isthmus.features.values.entitykey import entity_key
from tests.features.publishing.test_publish import VIEW, Row, World, after, features_of, key_of, order_of
from tests.features.support import make_contract

_COMMANDS = (
    "record_text",
    "replace",
    "take_suspects",
    "still_holds",
    "missing",
    "write",
    "remove",
    "remove_except",
    "servers",
)


class _DiedError(Exception):
    """The process is not there any more."""


class _Observed(OnlineStore):
    """The rows, for a run: before each of its commands something may happen."""

    def __init__(self, client: Client, before: Callable[[int], None]) -> None:
        super().__init__(client, make_contract(VIEW))
        self._count, self._before = 0, before

    def __getattribute__(self, name: str) -> Any:
        if name in _COMMANDS:
            self._count += 1
            self._before(self._count)
        return super().__getattribute__(name)


class _Slow(OnlineStore):
    """The rows, for a push: while it is between two of its commands, something happens once."""

    def __init__(self, client: Client, after: str, happens: Callable[[], object]) -> None:
        super().__init__(client, make_contract(VIEW))
        self._after, self._happens = after, happens

    def published(self, *arguments: Any) -> Any:
        return self._then("published", super().published(*arguments))

    def _suspect(self, *arguments: Any) -> None:
        self._then("_suspect", super()._suspect(*arguments))

    def _then(self, name: str, result: Any) -> Any:
        if name == self._after:
            self._after = ""
            self._happens()
        return result


def _left(before: dict[int, Row], table: dict[int, list[Row]], now: int, horizon: int) -> dict[int, Row]:
    """What a run leaves: the table decides about all that was known by the horizon."""
    rows = {}
    for key in {*before, *table}:
        some = [row for row in table.get(key, ()) if row[0] <= now and row[1] <= now]
        if key in before and before[key][1] > horizon:
            some.append(before[key])
        if some:
            rows[key] = max(some, key=order_of)
    return rows


class _Play:
    """A world to which things happen."""

    def __init__(self, world: World) -> None:
        self.world = world

    def horizon(self) -> int:
        record = self.world.store.published(VIEW)
        known = [row[1] for rows in self.world.table.values() for row in rows if row[1] <= self.world.now]
        return max([-(1 << 63) if record is None else record.horizon, *known])

    def quiet(self, *, full: bool = False) -> None:
        """A run that nobody disturbs."""
        before, horizon, world = self.world.held(), self.horizon(), self.world
        world.publish(full=full)
        assert world.held() == _left(before, world.table, world.now, (1 << 62) if full else horizon)

    def disturbed(self, due: int, happens: Callable[[], dict[int, Row]]) -> None:
        """A run in which something happens before one of its commands, and a reader looks before each of them."""
        world = self.world
        before, target = world.held(), _left({}, world.table, world.now, self.horizon())
        allowed = {key: {rows.get(key) for rows in (before, target)} for key in range(6)}

        def step(number: int) -> None:
            if number == due:
                for key, row in happens().items():
                    allowed[key].add(row)
            held = world.held()
            assert all(held.get(key) in rows for key, rows in allowed.items()), (number, held, allowed)

        store = _Observed(world.client, step)
        try:
            publish(store, world.url, world.offline, world.offline.history(VIEW), lambda: world.now)
        except _DiedError:
            return

    def flushed(self, due: int) -> None:
        """A run that does not end well if Redis loses everything before its last command."""
        world, done = self.world, False

        def step(number: int) -> None:
            nonlocal done
            if number == due:
                world.client.flushall()
                done = True

        store = _Observed(world.client, step)
        target = _left({}, world.table, world.now, self.horizon())
        try:
            publish(store, world.url, world.offline, world.offline.history(VIEW), lambda: world.now)
        except DependencyError:
            assert done
            return
        if done:
            assert world.held() == target

    def push(self, key: int, row: Row, store: OnlineStore | None = None) -> dict[int, Row]:
        k, n = key_of(key)
        event, known = np.array([row[0]], np.int64), np.array([row[1]], np.int64)
        (store or self.world.store).write(VIEW, {"k": [k], "n": [n]}, event, known, features_of([row[2]]))
        return {key: row}

    def pushed(self, key: int, row: Row) -> None:
        """A push that nobody disturbs: newer rows win, but not over what a stamp says of their time."""
        before, record = self.world.held(), self.world.store.published(VIEW)
        until = record.stamp.until if record is not None and record.stamp is not None else -(1 << 63)
        self.push(key, row)
        if row[1] > until and (key not in before or order_of(row) > order_of(before[key])):
            before[key] = row
        assert self.world.held() == before

    def die(self) -> dict[int, Row]:
        raise _DiedError


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["restamp all", "restamp all", "restamp some", "change", "correct", "drop", "rewind", "nothing",
                         "push", "push", "push in a run", "push in a run", "death", "run in a push", "flush",
                         "flush in a run", "save", "return", "lose", "forget", "crowd", "full"]),
        st.integers(0, 5), st.integers(0, 9), st.integers(0, 25), st.integers(0, 25), st.integers(1, 14), st.booleans(),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@given(first=st.sets(st.integers(0, 5), min_size=1), steps=_STEPS)
def test_whatever_happens_in_whatever_order(
    client: Client, url: str, first: set[int], steps: Sequence[tuple[str, int, int, int, int, int, bool]]
) -> None:
    with TemporaryDirectory() as folder:
        world = World(Path(folder), url, client)
        play, saved = _Play(world), dict[bytes, bytes]()
        world.now = 10
        world.write({key: [(1, 2, key)] for key in first})
        for n, (what, key, lag, early, older, due, run) in enumerate(steps):
            world.now = now = 10 * (n + 2)
            table = after(world.table, what, key, n, now - lag)
            if table != world.table:
                world.write(table)
            row = (now - early - older, now - early, 200 + n)
            match what:
                case "push":
                    play.pushed(key, row)
                case "push in a run":
                    play.disturbed(due, lambda key=key, row=row: play.push(key, row))  # type: ignore[misc]
                case "death":
                    play.disturbed(due, play.die)
                case "run in a push":
                    slow = _Slow(client, "_suspect" if due % 2 else "published", world.publish)
                    play.push(key, row, slow)
                case "flush":
                    client.flushall()
                case "flush in a run":
                    play.flushed(due)
                case "save":
                    saved = _saved(client)
                case "return":
                    # A server that was started again, and has only what it had saved.
                    client.flushall()
                    for name, held in saved.items():
                        client.restore(name, 0, held)
                case "lose":
                    client.delete(entity_key("prod", list(zip(VIEW.keys, key_of(key), strict=True))))
                case "forget":
                    client.hdel("prod:tables", VIEW.name)
                case "crowd":
                    _crowd(world)
                case "full":
                    play.quiet(full=True)
            if run:
                play.quiet()
        world.now += 100
        world.write({key: [*rows, (world.now, world.now, 1000 + key)] for key, rows in world.table.items()})
        play.quiet()
        assert world.held() == {key: rows[-1] for key, rows in world.table.items()}


def _saved(client: Client) -> dict[bytes, bytes]:
    names = cast("list[bytes]", client.keys("*"))
    return {name: cast("bytes", client.dump(cast("str", name))) for name in names if not name.endswith(b"|lock")}


def _crowd(world: World) -> None:
    """More keys of others than are remembered."""
    name = suspects_key("prod", VIEW.name)
    if world.store.published(VIEW) is not None:
        world.client.delete(name)
        world.client.zadd(cast("str", name), {"*": float("inf")})
