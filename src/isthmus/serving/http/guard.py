"""Check API keys (`Guarded`), enforce the limits of the server (`Limited`), and reject pages of other web sites."""

import ipaddress
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.features.errors import IsthmusError
from isthmus.serving.deadlines import DEADLINE, REFUSAL, Deadline, Deadlines
from isthmus.serving.keys import EVERYTHING, Grants, Keyring, required_marker
from isthmus.serving.limits import Limits
from isthmus.serving.watchedfile import WatchedFile
from isthmus.serving.wire import errors

OPEN = frozenset({"/healthz", "/v2/health/live", "/docs", "/openapi.json"})
"""Paths answered without a key. A process manager should not need a secret to learn that the process is up. A browser
has no key before its page asks for one; the page and the OpenAPI document name no project, view or model."""

OPEN_FOLDER = "/docs/assets/"

UNCOUNTED = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics"})
"""Paths outside the limit on concurrent requests. Monitoring needs their answers most when the server is busy."""

_CREATE = "create a key with `isthmus keys create NAME --scope 'read:*'`"
_LOST = f"{_CREATE}, restore the key file, or open the server with `isthmus keys open`"
_HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]+)?")
_REMEDY = "send `Authorization: Bearer KEY`, with a key of `isthmus keys create NAME --scope 'read:*'`"


class Guarded:
    """An ASGI application that requires API keys once any exist. Refused requests get 401, 403, 429 or 503.

    It checks the key file at each request, so a revoked key is refused from then on. If `unguarded`, programs of this
    machine need no key while no key has ever existed, or after `isthmus keys open`. They must call it by a loopback
    name or one of `hosts`. `rate` is in requests per second for each key.
    """

    def __init__(
        self, app: ASGIApp, file: Path | None, *, unguarded: bool, hosts: Sequence[str] = (), rate: int | None
    ) -> None:
        self._app = app
        self._file = None if file is None else WatchedFile(file, Keyring.checked)
        self._required = None if file is None else str(required_marker(file))
        self._unguarded = unguarded
        self._hosts = frozenset(hosts)
        self._had_keys = False
        self._rate = rate
        self._buckets: dict[str, tuple[float, float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                if scope["path"] not in OPEN and not scope["path"].startswith(OPEN_FOLDER):
                    grants = self._grants(scope)
                    scope.setdefault("state", {})["grants"] = grants
                    if self._rate is not None and grants.name:
                        self._take(grants.name, self._rate)
            except IsthmusError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _grants(self, scope: Scope) -> Grants:
        ring = self._ring()
        if ring is not None and ring.keys:
            self._had_keys = True
        elif self._unguarded and ((ring is not None and ring.open is True) or self._never_had_keys()):
            require_own_page(scope, self._hosts, host_remedy=f"name it in `[server] hosts`, or {_CREATE}")
            return EVERYTHING
        else:
            raise errors.UnauthenticatedError("API key", "this server has no valid keys", remedy=_LOST)
        presented = _bearer(scope)
        if presented is None:
            raise errors.UnauthenticatedError("API key", "is missing from the request", remedy=_REMEDY)
        key = ring.find(presented)
        if key is None:
            raise errors.UnauthenticatedError("API key", "is unknown", remedy=_REMEDY)
        return Grants(key.name, frozenset(key.scopes))

    def _never_had_keys(self) -> bool:
        """Return True if no key has ever existed. Losing the key file must not open the server."""
        if self._had_keys or self._required is None:
            return not self._had_keys
        try:
            os.stat(self._required)  # noqa: PTH116 - pathlib takes twice as long
        except FileNotFoundError:
            return True
        return False

    def _ring(self) -> Keyring | None:
        if self._file is None:
            return None
        if self._file.changed():
            self._file.load()
        content = self._file.content
        if isinstance(content, IsthmusError):
            # Do not show the path to a caller without a key; the log has it.
            raise errors.NotReadyError("the key file", content.found, expected=content.expected, remedy=content.remedy)
        return content

    def _take(self, name: str, rate: int) -> None:
        # A token bucket per key that holds one second's requests.
        now = time.monotonic()
        tokens, before = self._buckets.get(name, (float(rate), now))
        tokens = min(tokens + (now - before) * rate, rate)
        self._buckets[name] = (tokens - 1 if tokens >= 1 else tokens, now)
        if tokens < 1:
            raise errors.TooManyError(
                f"API key {name}", "exceeds its request rate", expected=f"{rate:,} requests per second at most"
            )


class Limited:
    """An ASGI application that limits concurrent requests, the time of each, and the size of its body.

    A request beyond a limit gets 503 (busy or late), 408 (slow body) or 413 (large body). If the time is up after the
    answer has begun, the connection is closed.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._deadlines = Deadlines(limits.deadline_seconds)
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted = scope["path"] not in UNCOUNTED
        if counted and self._under_way >= self._limits.concurrency:
            busy = f"{self._under_way:,} requests are in progress"
            remedy = "try again, or raise server.limits.concurrency or server.workers"
            await error_response(errors.BusyError("server", busy, remedy=remedy), scope)(scope, receive, send)
            return
        self._under_way += counted
        try:
            await self._answer(scope, receive, send)
        finally:
            self._under_way -= counted

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = int(_header(scope, b"content-length") or 0)
        if announced > self._limits.body_bytes:
            error = _too_long(f"has {announced:,} bytes", self._limits.body_bytes)
            await error_response(error, scope)(scope, receive, send)
            return
        exchange = _Exchange(receive, send, self._limits.body_bytes)
        deadline = scope[DEADLINE] = Deadline(self._deadlines)
        try:
            with deadline:
                await self._app(scope, exchange.receive, exchange.send)
        except TimeoutError:
            if not deadline.expired:
                raise
            seconds = self._limits.deadline_seconds
            if exchange.started:
                return  # the connection is closed: a partial answer would be invalid
            if exchange.reading:
                late: IsthmusError = errors.TooSlowError(
                    "body", "did not arrive in time", expected=f"all of it within {seconds:g} seconds"
                )
            else:
                late = errors.BusyError("server", f"could not answer within {seconds:g} seconds", remedy="try again")
            await error_response(late, scope)(scope, receive, send)


@dataclass(eq=False)
class _Exchange:
    _receive: Receive
    _send: Send
    _most: int
    _read: int = 0
    _more: bool = True
    reading: bool = False
    started: bool = False

    async def receive(self) -> Message:
        # After the whole body, the only message is a disconnect.
        self.reading = self._more
        message = await self._receive()
        self.reading, self._more = False, bool(message.get("more_body"))
        self._read += len(message.get("body", b""))
        if self._read > self._most:
            raise _too_long(f"has more than {self._most:,} bytes", self._most)
        return message

    async def send(self, message: Message) -> None:
        self.started = True
        await self._send(message)


def require_own_page(
    scope: Scope, hosts: Collection[str], *, host_remedy: str, site_remedy: str = _CREATE, visits: bool = False
) -> None:
    """Raise ForbiddenError if a web page of another site sent this request or WebSocket through a local user's browser.

    Call it for requests that need no API key. A page can point its own host name at this machine, so a request over
    loopback must name a loopback host or one of `hosts`. The error for a wrong host tells the user to do `host_remedy`,
    and the error for a page of another site tells the user to do `site_remedy`. With `visits`, a browser may follow a
    link from another site.
    """
    named = [value for header, value in scope["headers"] if header == b"host"]
    foreign = [host for host in named if not _is_loopback(host) and _name(host) not in hosts]
    if foreign and _by_loopback(scope):
        raise errors.ForbiddenError(
            "request", f"is for host {foreign[0].decode('latin-1')[:100]!r}", expected="a host name of this machine",
            remedy=host_remedy,
        )  # fmt: skip
    origin, site = _header(scope, b"origin"), _header(scope, b"sec-fetch-site")
    # Browsers send the origin with every WebSocket handshake, but differ in `sec-fetch-site`.
    elsewhere = scope["type"] == "http" and site not in (None, b"same-origin", b"none")
    if visits and elsewhere and scope["method"] == "GET":
        elsewhere = (_header(scope, b"sec-fetch-mode"), _header(scope, b"sec-fetch-dest")) != (b"navigate", b"document")
    if elsewhere or (origin is not None and origin.partition(b"://")[2] not in named):
        raise errors.ForbiddenError(
            "request", "comes from a page of another site", expected="a program, or an API key",
            remedy=site_remedy,
        )  # fmt: skip


def _by_loopback(scope: Scope) -> bool:
    """Return True if a request came to a loopback address, or if the address is unknown."""
    try:
        address = ipaddress.ip_address((scope.get("server") or ("",))[0])
    except ValueError:
        return True
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def grants_of(request: Request) -> Grants:
    grants: Grants = request.scope["state"]["grants"]
    return grants


def error_response(error: IsthmusError, scope: Scope) -> Response:
    """Create the JSON response to an error. Stores the error's class name in `scope`, for the metrics and the log."""
    scope[REFUSAL] = type(error).__name__
    content = error.as_dict()
    if scope["path"].startswith("/v2"):
        # Clients of the Open Inference Protocol show `error`, so it must be the message.
        content |= {"error": str(error), "kind": content["error"]}
    body = orjson.dumps(content)
    # Caches may store a 404 by default, and it can reveal whether an owner exists.
    headers = {"cache-control": "no-store", **errors.headers(error)}
    return Response(body, errors.status(error), headers, media_type="application/json")


def _too_long(length: str, most: int) -> errors.TooLargeError:
    return errors.TooLargeError("body", length, expected=f"{most:,} at most", remedy="split it into several requests")


def _name(host: bytes) -> str:
    match = _HOST.fullmatch(host.decode("latin-1").lower())
    return (match["address"] or match["name"]).removesuffix(".") if match else ""


@lru_cache
def _is_loopback(host: bytes) -> bool:
    """Return True if a `Host` field can only mean this machine. `localhost` does, as DNS servers do not resolve it."""
    name = _name(host)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _bearer(scope: Scope) -> bytes | None:
    scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" and token else None


def _header(scope: Scope, name: bytes) -> bytes | None:
    value: bytes | None = next((value for header, value in scope["headers"] if header == name), None)
    return value
