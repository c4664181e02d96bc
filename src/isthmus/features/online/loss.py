"""Find views whose rows Redis has lost, by comparing Redis with a file of the last materializations."""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from isthmus.features.clock import Status
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError, LostRowsError
from isthmus.features.files import write_atomically
from isthmus.features.online import record as records
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.online.record import Published
from isthmus.features.redis.routing import Command

FILE = "materialized.json"
SAMPLE = 64
"""Number of sampled keys per view."""
INFO = ("server", "stats", "memory")
"""Sections of Redis' INFO with run_id, evicted_keys and maxmemory_policy."""

_KEEP = "set `maxmemory-policy noeviction` in redis.conf, or run `CONFIG SET maxmemory-policy noeviction`"


class LastMaterialization(msgspec.Struct, frozen=True):
    """The last materialization of a view, with fields of its `Published` record."""

    contract: str
    built: int
    at: int
    horizon: int = records.NEVER


LastMaterializations = Mapping[str, LastMaterialization]
"""Online name of a view to its last materialization."""


class Losses(NamedTuple):
    """Views that may have lost rows: online name to reason.

    `policy` is why Redis may evict rows; empty if it does not.
    """

    views: Mapping[str, str] = {}
    policy: str = ""


def loads(text: bytes, where: str) -> dict[str, LastMaterialization]:
    try:
        return msgspec.json.decode(text, type=dict[str, LastMaterialization])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(where, f"cannot be read ({error})", remedy="run `isthmus materialize`") from error


def read(file: Path) -> dict[str, LastMaterialization]:
    try:
        return loads(file.read_bytes(), str(file))
    except (FileNotFoundError, DataError):
        return {}


def record_materialization(file: Path, view: ViewContract, record: Published) -> None:
    # Concurrent calls would lose entries: the caller holds a lock.
    entry = LastMaterialization(record.contract, record.built, record.at, record.horizon)
    write_atomically(file, msgspec.json.encode({**read(file), view.online_name: entry}))


def sample_key(project: str, view: ViewContract) -> bytes:
    return records.view_key(project, view.online_name, "sample")


def decode_sample(text: bytes | None) -> list[bytes]:
    try:
        return [] if text is None else msgspec.msgpack.decode(text, type=list[bytes])
    except msgspec.DecodeError:
        return []


def check(
    project: str,
    views: Collection[ViewContract],
    written: LastMaterializations,
    nodes: Sequence[Mapping[str, Any]],
) -> Generator[list[Command], list[Any], Losses]:
    """Find views whose rows Redis may have lost, by eviction, a restart or a restore.

    This generator does no I/O, so that synchronous and asynchronous callers can share it. It yields lists of Redis
    commands, takes their replies by `send`, and returns the losses. `written` has the last materializations by online
    name of the view, from `read`. `nodes` has the INFO output of each Redis server. If it is empty, evictions and
    restarts are not checked.
    """
    if not views:  # a project of request features alone; HMGET needs a field
        yield []
        return Losses({}, _policy(nodes))
    lost, commands = dict[str, str](), list[Command]()
    query = records.query(project, views)
    texts, *samples = yield [query, *((b"GET", sample_key(project, view)) for view in views)]
    for view, text, keys in zip(views, texts, samples, strict=True):
        record, last = records.decode(text), written.get(view.online_name)
        if why := _differs(record, last if last is not None and last.contract == view.hash else None, nodes):
            lost[view.online_name] = why
        elif record is not None and not record.pending and record.contract == view.hash:
            commands += [(b"HEXISTS", key, view.online_name.encode()) for key in decode_sample(keys)]
    replies = (yield commands) if commands else []
    gone = [command[2].decode() for command, exists in zip(commands, replies, strict=True) if not exists]
    # If a record has changed meanwhile, a new materialization may have removed sampled keys.
    if gone and (yield [query]) == [texts]:
        lost |= {name: f"{gone.count(name)} sampled keys are gone" for name in gone}
    policy = _policy(nodes)
    return Losses({name: f"{why}; {policy}" if policy else why for name, why in lost.items()}, policy)


def _differs(record: Published | None, last: LastMaterialization | None, nodes: Iterable[Mapping[str, Any]]) -> str:
    if record is None:
        return "" if last is None else "Redis has no record of the materialization"
    if last is not None and (record.built, record.at) < (last.built, last.at):
        return "Redis was restored to the rows of an earlier materialization"
    # A run says until when an earlier one was complete: NEVER, if Redis had nothing when it began.
    if last and record.pending and record.contract == last.contract and record.complete < last.horizon:
        return "Redis does not hold all rows of the last materialization again"
    for node in nodes:
        before, now = record.servers.get(str(node["run_id"])), int(node["evicted_keys"])
        if before is None and int(node["maxmemory"]) and _policy([node]):
            return "Redis was restarted, and may have evicted keys before"
        # Rows have no expiry, so volatile policies never evict them.
        if before not in (None, now) and not str(node["maxmemory_policy"]).startswith("volatile-"):
            return f"Redis has evicted {now:,} keys"
    return ""


def _policy(nodes: Iterable[Mapping[str, Any]]) -> str:
    policies = [str(node["maxmemory_policy"]) for node in nodes]
    wrong = [policy for policy in policies if not policy.startswith(("noeviction", "volatile-"))]
    return f"Redis may evict rows (maxmemory-policy {wrong[0]}): {_KEEP}" if wrong else ""


def refusal(view: str, why: str) -> LostRowsError:
    return LostRowsError(
        f"view {view}", f"has lost online rows: {why}", remedy="run `isthmus materialize`", passes=False
    )


def require_rows(lost: Mapping[str, str], views: Iterable[ViewContract], answers: Mapping[str, ViewAnswer]) -> None:
    """Raise LostRowsError if a lookup found no row for some key of a view that may have lost rows in Redis.

    Otherwise, a lost row would look like an unknown key. `lost` has the reasons by online name of the view, from
    `Losses.views`. `answers` has the results of the lookup by view name.
    """
    for view in views:
        answer = answers[view.name]
        absent = (answer.status == Status.NOT_FOUND) & (answer.known == 0)
        if view.online_name in lost and np.count_nonzero(absent):
            raise refusal(view.name, lost[view.online_name])
