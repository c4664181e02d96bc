"""A push: rows written to the online store by the rule that every row is written by."""

import orjson

from isthmus.features.errors import RequestError
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.push import FEAST, PUSH, Form
from isthmus.serving.redis.store import Store
from isthmus.serving.state import State
from isthmus.serving.threads import BYTES, offload
from isthmus.serving.wire.messages import PushRequest, WriteRequest


async def push(request: PushRequest | WriteRequest, state: State, store: Store, limits: Limits, now: int) -> bytes:
    """Writes the rows of a request, all or none, and answers how many.

    A lookup sees them from then on. A row replaces what is stored if it is newer by (event time, known time, content):
    of two pushes with the same event time the later wins, since it became known later. A server with a fixed present
    knows all pushes at that time, and if the event times are equal, too, the content decides.
    """
    name, form = view_of(request)
    pushed = state.pushed(name, form)
    if isinstance(request, PushRequest) and request.to != "online":
        raise RequestError(
            "to", f"{request.to!r}, and the server has no offline store", expected="online",
            remedy="let a source of the view hold the rows, and run `isthmus build`",
        )  # fmt: skip
    view = state.contract.view(name)
    large = sum(len(memoryview(raw)) for raw in request.df.values()) > BYTES
    names, rows = await offload(large, pushed.pack, request.df, limits, now)
    return orjson.dumps({"rows": len(rows), "written": await store.write(state.contract.project, view, names, rows)})


def view_of(request: PushRequest | WriteRequest) -> tuple[str, Form]:
    """The name of the view that rows are pushed to, and their form."""
    if isinstance(request, PushRequest):
        return request.push_source_name, PUSH
    return request.feature_view_name, FEAST
