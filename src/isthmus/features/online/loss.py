"""Lost rows: what was materialized, by a file beside the contract, against what Redis holds.

The check costs a few commands, whatever the size of a view: the record of each view, how many keys each server has
evicted, and whether a sample of keys is there.
"""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from isthmus.features.clock import Status
from isthmus.features.contract.contract import ViewContract
from isthmus.features.errors import DataError, LostRowsError
from isthmus.features.files import write_atomically
from isthmus.features.online import record as records
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.online.record import Published
from isthmus.features.redis.routing import Command

FILE = "materialized.json"

SAMPLE = 64
"""Keys of a view that must be there."""

INFO = ("server", "stats", "memory")
"""Sections of a server's INFO with its run_id, evicted_keys and maxmemory_policy."""

_SAFE = ("noeviction", "volatile-")  # No key of ours but a lock has a time to live.
_KEEP = "set `maxmemory-policy noeviction` in redis.conf, or run `CONFIG SET maxmemory-policy noeviction`"


class Written(msgspec.Struct, frozen=True):
    """The last materialization of a view, with the fields of its `Published` record."""

    contract: str
    built: int
    at: int


Materialized = Mapping[str, Written]
"""Online name of a view to its last materialization."""


class Losses(msgspec.Struct, frozen=True):
    """The result of a check.

    Attributes:
        views: online name of each view that may have lost rows, to the reason.
        policy: why Redis may drop rows at any time; empty if it may not.
    """

    views: Mapping[str, str] = {}
    policy: str = ""


def loads(text: bytes, where: str) -> dict[str, Written]:
    """Online name of a view to its last materialization, from the content of the file."""
    try:
        return msgspec.json.decode(text, type=dict[str, Written])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(where, f"cannot be read ({error})", remedy="run `isthmus materialize`") from error


def read(file: Path) -> dict[str, Written]:
    """The content of the file; nothing if it is missing or damaged."""
    try:
        return loads(file.read_bytes(), str(file))
    except (FileNotFoundError, DataError):
        return {}


def note(file: Path, view: ViewContract, record: Published) -> None:
    """Write to the file that a view was materialized."""
    entry = Written(record.contract, record.built, record.at)
    write_atomically(file, msgspec.json.encode({**read(file), view.online_name: entry}))


def sample(project: str, view: ViewContract) -> bytes:
    """The Redis key of the sample of a view's keys, as MessagePack."""
    return records.beside(project, view.online_name, "sample")


def check(
    project: str, views: Collection[ViewContract], written: Materialized, nodes: Sequence[Mapping[str, Any]]
) -> Generator[list[Command], list[Any], Losses]:
    """Yield Redis commands, take their replies, and return what is lost; `nodes` are the INFO of the servers."""
    lost, samples = dict[str, str](), dict[str, list[Command]]()
    query = [records.query(project, views)]
    texts, *kept = yield [*query, *((b"GET", sample(project, view)) for view in views)]
    for view, text, keys in zip(views, texts, kept, strict=True):
        record, last = records.decode(text), written.get(view.online_name)
        if last is not None and last.contract != view.hash:
            last = None
        if why := _differs(record, last, nodes, sampled=keys is not None):
            lost[view.online_name] = why
        elif keys is not None and record is not None and not record.pending and record.contract == view.hash:
            field = view.online_name.encode()
            samples[view.online_name] = [(b"HEXISTS", key, field) for key in msgspec.msgpack.decode(keys)]
    commands = [command for own in samples.values() for command in own]
    there = iter((yield commands) if commands else ())
    gone = {name: sum(not next(there) for _ in own) for name, own in samples.items()}
    # A materialization that began meanwhile may have removed keys of the sample: its record says so.
    if any(gone.values()) and (yield query) == [texts]:
        lost |= {
            name: f"{count} of {len(samples[name])} sampled keys are gone" for name, count in gone.items() if count
        }
    evicting = policy(nodes)
    more = {name: f"{why}, and it evicts keys" for name, why in lost.items() if evicting and "evict" not in why}
    return Losses({**lost, **more}, evicting)


def _differs(
    record: Published | None, last: Written | None, nodes: Iterable[Mapping[str, Any]], *, sampled: bool
) -> str:
    """Why a view may have lost rows, by its record; empty if the record gives no reason."""
    if record is None:
        return "" if last is None else "Redis holds nothing of what was materialized"
    if last is not None and (record.built, record.at) < (last.built, last.at):
        return "Redis has come back with the rows of an earlier materialization"
    if last is not None and not sampled and not record.pending:
        return "Redis has lost what is stored beside the rows"
    for node in nodes:
        before, now = record.servers.get(str(node["run_id"])), int(node["evicted_keys"])
        evicts = int(node["maxmemory"]) and not str(node["maxmemory_policy"]).startswith(_SAFE)
        if before is None and evicts:
            return f"Redis was started again and evicts keys ({node['maxmemory_policy']})"
        if before not in (None, now) and not str(node["maxmemory_policy"]).startswith("volatile-"):
            return f"Redis has evicted {now:,} keys"
    return ""


def policy(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Why Redis may evict rows; empty if it may not."""
    for node in nodes:
        if not str(node["maxmemory_policy"]).startswith(_SAFE):
            return f"Redis may evict rows (maxmemory-policy {node['maxmemory_policy']}): {_KEEP}"
    return ""


def refusal(view: str, why: str) -> LostRowsError:
    """The error about a view that may have lost rows."""
    first = f"{_KEEP}, and then " if "evict" in why else ""
    found, remedy = f"has lost online rows: {why}", f"{first}run `isthmus materialize`"
    return LostRowsError(f"view {view}", found, remedy=remedy, passes=False)


def require_rows(lost: Mapping[str, str], views: Iterable[ViewContract], answers: Mapping[str, ViewAnswer]) -> None:
    """Raise a LostRowsError if an answer lacks a row of a view that may have lost it."""
    for view in views:
        answer = answers[view.name]
        absent = (answer.status == Status.NOT_FOUND) & (answer.known == 0)
        if view.online_name in lost and np.count_nonzero(absent):
            raise refusal(view.name, lost[view.online_name])
