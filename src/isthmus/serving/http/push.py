"""Push rows to the online store and the history."""

import orjson

from isthmus.features.days import DAY
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.push import FEAST, FIRST, PUSH, PushFormat, Times, first_per_table, pack_all
from isthmus.serving.redis.store import Store
from isthmus.serving.state import State
from isthmus.serving.threads import BYTES, offload
from isthmus.serving.wire.messages import PushRequest, WriteRequest


async def push(request: PushRequest | WriteRequest, state: State, store: Store, limits: Limits, now: int) -> bytes:
    """Handle a push: write its rows to the online store, the history (offline tables), or both; return counts as JSON.

    `state` has the definitions of views, and `now` is the time of the push in microseconds since 1970 UTC. All rows are
    checked first, so nothing was written after a RequestError. Rows enter the queue for the history before the online
    store, so that the history has every row that was served. After a DependencyError (Redis is slow, or too many rows
    wait), some rows may be written, and the client must push all of them again.

    A row replaces the stored row if it is newer by (event time, known time, content). While the definition of a view
    changes, rows may have the columns of the current or the next contract. They are written for both, and for older
    definitions that are still in use.
    """
    name, form = view_of(request)
    declared, older = state.pushed(name, form)
    to = request.to if isinstance(request, PushRequest) else "online"
    large = sum(len(memoryview(raw)) for raw in request.df.values()) > BYTES
    oldest = max(limits.push_days * DAY, *(each.view.ttl or 0 for each in declared))
    first = FIRST if to == "online" else max(FIRST, now - oldest)
    parts = await offload(large, pack_all, declared, older, request.df, limits, Times(first, now))
    project, count = state.contract.project, len(parts[0][2])
    if to != "online":
        for view, names, rows in first_per_table(parts):
            await store.append(project, view, names, rows, now, limits.waiting_rows)
    if to == "offline":
        return orjson.dumps({"rows": count, "written": 0})
    written = [await store.write(project, view, names, rows) for view, names, rows in parts]
    return orjson.dumps({"rows": count, "written": written[0]})


def view_of(request: PushRequest | WriteRequest) -> tuple[str, PushFormat]:
    if isinstance(request, PushRequest):
        return request.push_source_name, PUSH
    return request.feature_view_name, FEAST
