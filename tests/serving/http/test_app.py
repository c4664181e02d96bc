"""Responses of the application, without a server."""

import asyncio
from typing import Any

import pytest
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from isthmus import RequestError
from isthmus.serving.http.app import _Application


def test_an_answer_that_fails_after_it_has_begun_is_the_only_one() -> None:
    async def half(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RequestError("rows", "are too many")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": "/half/done", "headers": [], "query_string": b"", "root_path": ""}
    application = _Application([Mount("/half", app=half)], lambda _app: None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="are too many"):
        asyncio.run(application(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start"]
