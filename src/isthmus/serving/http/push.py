"""A push: rows written to the online store by the rule that every row is written by."""

from collections.abc import Sequence

import orjson

from isthmus.features.contract.contract import ViewContract
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.push import FEAST, PUSH, Form, PushedView, Raws
from isthmus.serving.redis.store import Store
from isthmus.serving.state import State
from isthmus.serving.threads import BYTES, offload
from isthmus.serving.wire.errors import RowsError
from isthmus.serving.wire.messages import PushRequest, WriteRequest


async def push(request: PushRequest | WriteRequest, state: State, store: Store, limits: Limits, now: int) -> bytes:
    """Writes the rows of a request, all or none, and answers how many.

    A lookup sees them from then on. A row replaces what is stored if it is newer by (event time, known time, content):
    of two pushes with the same event time the later wins, since it became known later. A server with a fixed present
    knows all pushes at that time, and if the event times are equal, too, the content decides.

    While definitions change, the rows have the columns of the current contract or of the next one, and reach the rows
    of both, as well as those of contracts that are still kept.

    Unless they are for the online store alone, they are on their way to the history before they are written: what is
    served without being in the history is less than what the history has and nobody serves yet.
    """
    name, form = view_of(request)
    declared, kept = state.pushed(name, form)
    to = request.to if isinstance(request, PushRequest) else "online"
    large = sum(len(memoryview(raw)) for raw in request.df.values()) > BYTES
    packed = await offload(large, _packed, declared, kept, request.df, limits, now)
    project = state.contract.project
    if to != "online":
        # Once for each table: first the definition that has all columns of the rows.
        tables = {view.table: (view, names, rows) for view, names, rows in reversed(packed)}
        for view, names, rows in tables.values():
            await store.append(project, view, names, rows, now, limits.waiting_rows)
    if to == "offline":
        return orjson.dumps({"rows": len(packed[0][2]), "written": 0})
    written = [await store.write(project, view, names, rows) for view, names, rows in packed]
    return orjson.dumps({"rows": len(packed[0][2]), "written": written[0]})


def _packed(
    declared: Sequence[PushedView], kept: Sequence[PushedView], df: Raws, limits: Limits, now: int
) -> list[tuple[ViewContract, list[bytes], list[bytes]]]:
    """For each definition that the rows fit: itself, the Redis keys and the packed rows."""
    refusals = []
    for first in declared:
        try:
            packed = [(first.view, *first.pack(df, limits, now))]
        except RowsError as error:
            refusals.append(error)
            continue
        others = [pushed for pushed in (*declared, *kept) if pushed is not first]
        fitting = [(pushed.view, pushed.pack_known(df, limits, now)) for pushed in others]
        return packed + [(view, *rows) for view, rows in fitting if rows is not None]
    raise refusals[0]


def view_of(request: PushRequest | WriteRequest) -> tuple[str, Form]:
    """The name of the view that rows are pushed to, and their form."""
    if isinstance(request, PushRequest):
        return request.push_source_name, PUSH
    return request.feature_view_name, FEAST
