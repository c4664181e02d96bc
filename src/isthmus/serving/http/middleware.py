"""`Observed`: an ASGI application that adds request ids, and logs, counts and records requests."""

import os
import re
import time
from collections.abc import Iterable

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.serving import log
from isthmus.serving.deadlines import REFUSAL
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.recorder.recorder import ANSWER, HEADER, Recorder

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class Observed:
    """An ASGI application that adds request ids, logs and counts requests, records answers and logs exceptions."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, routes: Iterable[Route], recorder: Recorder | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._recorder = recorder
        self._routes = tuple(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        self._metrics.begin()
        request_id = _request_id(scope)
        recorder, status = self._recorder, 0

        async def observed(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                if recorder is None or (answer := scope.get(ANSWER)) is None:
                    request_id = request_id or _new_id()
                    message["headers"].append((b"x-request-id", request_id))
                else:
                    # Without an id from the caller, the log uses the id of the recorded answer.
                    identity = recorder.identity(answer)
                    request_id = request_id or identity
                    message["headers"] += ((b"x-request-id", request_id), (HEADER, identity))
            await send(message)

        details: dict[str, str] = {}
        left = False
        try:
            await self._app(scope, receive, observed)
        except ClientDisconnect:
            left = True
            details["found"] = "the client disconnected before its request was complete"
        except Exception as error:  # noqa: BLE001 - this is a bug: it has been answered, so just log the place
            details = {"exception": type(error).__name__, "at": log.place(error)}
        if (grants := scope.get("state", {}).get("grants")) and grants.name:
            details["key"] = grants.name
        if recorder is not None and status == 200 and (answer := scope.get(ANSWER)) is not None:
            answer.seconds, answer.caller = time.perf_counter() - start, details.get("key", "")
            recorder.add(answer)
        if not left and (refusal := scope.get(REFUSAL)) is not None:
            details["error"] = refusal
        seconds = time.perf_counter() - start
        # An answer counts only if the client stayed to read it. A request refused before routing has no route yet.
        route = scope.get("route") or next((r for r in self._routes if r.path_regex.match(scope["path"])), None)
        path = route.path if route else "unmatched"
        self._metrics.end(path, scope, 0 if left else status, seconds)
        # Do not log paths of snapshot owners, who may be persons. A path that matches no route, such as
        # `//snapshots/phone/ada`, may contain a name anywhere.
        named = route is not None and status < 400 and "value" not in route.param_convertors
        log.info(
            "request",
            id=(request_id or _new_id()).decode(),
            method=scope["method"],
            path=scope["path"] if named else path,
            status=status,
            ms=round(seconds * 1e3, 3),
            **details,
        )


def _request_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.match(value):
            return bytes(value)
    return None


def _new_id() -> bytes:
    return os.urandom(8).hex().encode()
