"""A push: rows written to the online store by the rule that every row is written by."""

import orjson

from isthmus.features.days import DAY
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.push import FEAST, FIRST, PUSH, Form, Times, by_table, packed
from isthmus.serving.redis.store import Store
from isthmus.serving.state import State
from isthmus.serving.threads import BYTES, offload
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
    oldest = max(limits.push_days * DAY, *(each.view.ttl or 0 for each in declared))
    first = FIRST if to == "online" else max(FIRST, now - oldest)
    parts = await offload(large, packed, declared, kept, request.df, limits, Times(first, now))
    project, count = state.contract.project, len(parts[0][2])
    if to != "online":
        for view, names, rows in by_table(parts):
            await store.append(project, view, names, rows, now, limits.waiting_rows)
    if to == "offline":
        return orjson.dumps({"rows": count, "written": 0})
    written = [await store.write(project, view, names, rows) for view, names, rows in parts]
    return orjson.dumps({"rows": count, "written": written[0]})


def view_of(request: PushRequest | WriteRequest) -> tuple[str, Form]:
    """The name of the view that rows are pushed to, and their form."""
    if isinstance(request, PushRequest):
        return request.push_source_name, PUSH
    return request.feature_view_name, FEAST
