"""What surrounds every request: its id, and its line in the log."""

import os
import re
import time

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.serving.log import place

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class Observed:
    """An ASGI application with a request id, an access log and no stack traces."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = structlog.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        request_id = _request_id(scope)
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id))
            await send(message)

        details: dict[str, str] = {}
        try:
            await self._app(scope, receive, observed)
        except ClientDisconnect:
            details["found"] = "the client left before its request was complete"
        except Exception as error:  # noqa: BLE001 - a defect of ours: it has been answered, the log names the place
            details = {"exception": type(error).__name__, "at": place(error)}
        if (grants := scope.get("state", {}).get("grants")) and grants.name:
            details["key"] = grants.name
        self._log.info(
            "request",
            id=request_id.decode(),
            method=scope["method"],
            path=scope["path"],
            status=status,
            ms=round((time.perf_counter() - start) * 1e3, 3),
            **details,
        )


def _request_id(scope: Scope) -> bytes:
    """The caller's id if it is one that can stand in a log, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.match(value):
            given: bytes = value
            return given
    return os.urandom(8).hex().encode()
