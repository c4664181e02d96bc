"""Reading online rows: the Redis commands of a lookup, and the time rules applied to the rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isthmus.features.clock import Status
from isthmus.features.contract.schema import Column, Contract, ViewContract
from isthmus.features.online import record
from isthmus.features.online.record import Stamp
from isthmus.features.redis.pipeline import Client, ask
from isthmus.features.redis.routing import Command
from isthmus.features.values.columns import Ints, Mask
from isthmus.features.values.entitykey import KeyValue, entity_keys
from isthmus.features.values.rows import Block, Columns, RowCodec

_FEW = 32
_PRESENT, _NOT_FOUND = np.uint8(Status.PRESENT), np.uint8(Status.NOT_FOUND)


@dataclass(frozen=True, slots=True)
class ViewAnswer:
    """The features of a view for n entity keys at one time, as read from Redis.

    Attributes:
        columns: values by feature name; null unless the status is present.
        status: codes of `Status`, shape (n,).
        complete: True if every row is present and has no null.
        event: int64 microseconds, shape (n,), 0 without a row.
        known: int64 microseconds, shape (n,), 0 without a row.
        foreign: index of each damaged row whose Redis key another program overwrote, to the key's Redis type.
    """

    columns: Columns
    status: np.ndarray[Any, np.dtype[np.uint8]]
    event: Ints
    known: Ints
    complete: bool = False
    foreign: Mapping[int, str] | None = None


class LookupPlan:
    """A compiled lookup of several views: send `commands` to Redis in one round trip, and pass the replies to `decode`.

    `earlier` contracts only improve the error about a row that was written under one of them. With `ahead`, rows whose
    event or known time is in the future are returned, as in Feast.
    """

    def __init__(
        self, contract: Contract, views: Iterable[str], earlier: Sequence[Contract] = (), *, ahead: bool = False
    ) -> None:
        self.contract = contract
        self.ahead = ahead
        self.views = [contract.view(name) for name in dict.fromkeys(views)]
        self.codecs = {
            view.name: RowCodec(view, [before.views[view.name] for before in earlier if view.name in before.views])
            for view in self.views
        }
        groups: dict[tuple[str, ...], list[ViewContract]] = {}
        for view in self.views:
            groups.setdefault(tuple(sorted(column.name for column in view.keys)), []).append(view)
        self._groups = list(groups.values())
        self.keys: dict[str, Column] = {column.name: column for view in self.views for column in view.keys}

    def bits(self, features: Iterable[tuple[str, str]]) -> dict[str, bytes]:
        names: dict[str, list[str]] = {}
        for view, feature in features:
            names.setdefault(view, []).append(feature)
        return {view: self.codecs[view].bits(own) for view, own in names.items()}

    def commands(self, keys: Mapping[str, Sequence[KeyValue]]) -> list[Command]:
        project = self.contract.project
        commands: list[Command] = []
        for views in self._groups:
            fields = tuple(view.online_name.encode() for view in views)
            commands += [(b"HMGET", name, *fields) for name in entity_keys(project, views[0].keys, keys)]
        return commands

    def decode(
        self, replies: Sequence[Sequence[bytes | None]], rows: int, at: int, stamps: Mapping[str, Stamp],
        check: bool | None = None,
    ) -> dict[str, ViewAnswer]:  # fmt: skip
        """Convert the Redis replies to `commands` to each view's features and status, by view name.

        Args:
            replies: one reply per command, in order.
            rows: number of entity rows looked up.
            at: time of the lookup in microseconds since 1970 UTC, at which rows must be valid.
            stamps: row times that Redis stores once per view, by view name. Read them before the rows, since a later
                stamp may not fit the rows.
            check: None to raise DataError for a damaged row, and ContractMismatch for a row of another definition. With
                False or True, such rows get the status DAMAGED, and only if all rows of a view have another definition,
                ContractMismatch is raised. True also compares the content of each row with its hash.
        """
        answers = {}
        for group, views in enumerate(self._groups):
            part = replies[group * rows : (group + 1) * rows]
            for position, view in enumerate(views):
                packed = [reply[position] for reply in part]
                codec = self.codecs[view.name]
                block, damaged = (
                    (codec.decode(packed), None) if check is None else codec.decode_lenient(packed, check=check)
                )
                answers[view.name] = answer(view, block, damaged, at, stamps.get(view.name), self.ahead)
        return answers

    def with_foreign(
        self, answers: Mapping[str, ViewAnswer], rows: int, foreign: Mapping[int, str]
    ) -> dict[str, ViewAnswer]:
        marked = {}
        for group, views in enumerate(self._groups):
            own = {place - group * rows: kind for place, kind in foreign.items() if place // rows == group}
            marked.update({view.name: replace(answers[view.name], foreign=own) for view in views})
        return marked

    def read(self, client: Client, keys: Mapping[str, Sequence[KeyValue]], at: int) -> dict[str, ViewAnswer]:
        """Look up rows in Redis over a synchronous client, in two round trips. Return each view's features and status.

        The results are by view name. `keys` has n values for each join key. `at` is the time of the lookup in
        microseconds since 1970 UTC. Raise DataError for a damaged row, ContractMismatch for a row of another definition
        of its view, and redis.RedisError if Redis fails.
        """
        (reply,) = ask(client, [record.query(self.contract.project, self.views)])
        stamps = record.stamps(self.views, reply)
        rows = len(next(iter(keys.values()), ()))
        return self.decode(ask(client, self.commands(keys)), rows, at, stamps)


def _all_present(view: ViewContract, block: Block, at: int, ahead: bool) -> bool:
    first, last = _bounds(block.event)
    begun = ahead or (last <= at and _bounds(block.known)[1] <= at)
    return begun and (view.ttl is None or at - first <= view.ttl)


def _bounds(times: Ints) -> tuple[int, int]:
    if len(times) > _FEW:
        return int(times.min()), int(times.max())
    few = times.tolist()  # min() and max() of a short list are faster
    return min(few), max(few)


def answer(
    view: ViewContract, block: Block, damaged: Mask | None, at: int, stamp: Stamp | None, ahead: bool
) -> ViewAnswer:
    """Decide which stored rows of a view are valid at the time `at`, and return their features and status.

    Args:
        view: definition of the view, with its ttl.
        block: decoded rows.
        damaged: mask of rows that get the status DAMAGED; None without any.
        at: time of the lookup in microseconds since 1970 UTC. Rows older than the view's ttl are expired.
        stamp: common times that replace the times of the rows that it covers, or None.
        ahead: True to return rows whose times are after `at`. Otherwise they count as not found.
    """
    if stamp is not None:
        event, known = stamp.apply(block.event, block.known)
        block = Block(block.present, event * block.present, known * block.present, block.columns)
    if block.columns.complete and _all_present(view, block, at, ahead):
        # The usual case, at a third of the cost.
        return ViewAnswer(block.columns, np.zeros(len(block.event), np.uint8), block.event, block.known, complete=True)
    visible = block.present if ahead else block.present & (block.event <= at) & (block.known <= at)
    status = np.where(visible, _PRESENT, _NOT_FOUND)
    if view.ttl is not None:
        status[visible & (at - block.event > view.ttl)] = Status.EXPIRED
    present = status == _PRESENT
    columns = block.columns
    if np.count_nonzero(present) != np.count_nonzero(block.present):
        columns = columns.only(present)
    status[present & ~columns.filled] = Status.NULL
    if damaged is not None:
        status[damaged] = Status.DAMAGED
    return ViewAnswer(columns, status, block.event, block.known)
