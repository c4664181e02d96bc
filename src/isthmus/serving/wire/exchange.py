"""Read and decode a request's body, and build responses."""

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from isthmus.features.errors import RequestError
from isthmus.serving.wire.body import FAILURES, require_distinct, unreadable
from isthmus.serving.wire.formats import Format

T = TypeVar("T")

Head = tuple[tuple[bytes, bytes], ...]


async def body_of(request: Request) -> bytes:
    parts = []
    while (message := await request.receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)
    raise ClientDisconnect


def message_of(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        message = decoder.decode(body)
        require_distinct(body)
    except msgspec.ValidationError as error:
        raise RequestError("body", str(error).replace("$", "body"), expected="the format in /docs") from error
    except FAILURES as error:
        raise unreadable("body", body, error) from error
    return message


class _Answer(Response):
    def __init__(self, body: bytes, head: Iterable[tuple[bytes, bytes]]) -> None:
        self.status_code = 200
        self.body = body
        self.background = None
        self.raw_headers = [*head, (b"content-length", b"%d" % len(body))]


def reply(body: bytes, contract: str | None = None, media_type: str = Format.JSON.value, more: Head = ()) -> Response:
    return _Answer(body, (*_head(contract, media_type), *more))


@lru_cache
def _head(contract: str | None, media_type: str) -> Head:
    kind = (b"content-type", media_type.encode())
    return (kind,) if contract is None else (kind, (b"isthmus-contract", contract.encode()))
