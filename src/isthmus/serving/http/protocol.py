"""A connection: uvicorn's, but a connection that stalls is closed.

A request has a deadline from the moment that its head is complete. The application does not see what comes before and
after: a connection without a request, a head that dribbles in, the rest of a body whose request has been refused, an
answer that nobody reads, requests that come faster than their answers. Each would stay for as long as it likes, and
costs memory, and a file, of which a process has a limited number. Nor does it see heads and trailers without an end:
their bytes and their fields are counted before anything is kept.

The head and the body of an answer, which uvicorn writes separately, leave in the same packet: each write wakes the
client, and that is most of what a small answer costs.
"""

import asyncio
import fcntl
import sys
import termios
from collections.abc import Sized
from typing import Any, cast

import orjson
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from isthmus.serving.limits import Limits
from isthmus.serving.wire.errors import HeadTooLargeError

WAIT_SECONDS = 5.0
"""How long each of these may take; also how long uvicorn keeps a connection between two requests."""

ACKNOWLEDGED = 1 << 16
"""Bytes of an answer that the client must acknowledge in that time, or the rest of the answer."""

REST = 1 << 20
"""Bytes that are read of what comes behind too long a head: what lies there unread when a connection is closed resets
it, and its client loses the answer."""

LEAVING_SECONDS = 0.25
"""How long a server that ends waits for a request that was sent before its client could know."""


class Configuration(uvicorn.Config):
    """Uvicorn's, with our limits."""

    limits = Limits()


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    _late: asyncio.TimerHandle | None = None
    _in_head = False
    _leaving = False
    _over = ""
    _fields = _size = _unparsed = _rest = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts to wait for the first request."""
        super().connection_made(cast("asyncio.Transport", _Corked(transport, self.loop)))
        self.flow = _Flow(self.transport, self.pipeline)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Waits for the rest of a head, if any: most heads come complete."""
        if self._over:
            self._rest += len(data)
            if self._rest > REST:
                self.transport.abort()
            return
        most = self._limits.head_bytes
        # The parser does not say where in its bytes a field begins: only from the next ones on is all of it counted.
        for start in range(0, len(data), most):
            if self._over or self.transport.is_closing():
                break
            self._parse(data[start : start + most] if len(data) > most else data)

    def _parse(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._over or self.transport.is_closing():
            return
        if self._unparsed > self._limits.head_bytes:
            # The parser keeps a field until it is complete, and a chunk's extension has no end either.
            self._over = f"has more than {self._limits.head_bytes:,} bytes"
            self.send_400_response(self._over)
        elif self._in_head and self._late is None:
            self._expect()

    def on_message_begin(self) -> None:
        """A head begins: the wait is over."""
        super().on_message_begin()
        self._arrived()
        self._in_head = True
        self._fields = self._size = self._unparsed = 0

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        self._count(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or a trailer, which nobody reads."""
        self._count(len(name) + len(value), 1)
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unparsed = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no request, or has a head or trailers beyond the limits."""
        if not self._over:
            super().send_400_response(msg)
            return
        cycle = self.cycle
        if (
            cycle is not None
            and not cycle.response_complete
            and (cycle.response_started or not cycle.more_body or self.pipeline)
        ):
            # Its answer has begun, or the next one that the client expects is to an earlier request.
            self.transport.abort()
            return
        error = HeadTooLargeError("head or trailers", self._over, expected=self._limits.head_words())
        content = orjson.dumps(error.as_dict())
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(content), content)
        )
        self._end()

    def _end(self) -> None:
        """Sends no more, and reads the rest, for a while: then whoever still sends gets the answer, too."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.can_write_eof():  # a connection with TLS
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._expect()

    def _count(self, size: int, fields: int) -> None:
        """Counts what the parser has found; an exception ends the parsing, and leads to `send_400_response`."""
        self._unparsed = 0
        self._size += size
        self._fields += fields
        if self._size > self._limits.head_bytes:
            self._over = f"has more than {self._limits.head_bytes:,} bytes"
        elif self._fields > self._limits.head_fields:
            self._over = f"has more than {self._limits.head_fields:,} fields"
        if self._over:
            raise ValueError(self._over)

    @property
    def _limits(self) -> Limits:
        return cast("Configuration", self.config).limits

    def on_headers_complete(self) -> None:
        """From here on, the deadline of the request counts."""
        self._in_head, self._unparsed = False, 0
        super().on_headers_complete()
        if self._leaving:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Waits for the rest of a body that nobody has read, so that the next request can begin."""
        super().on_response_complete()
        if self.cycle.more_body:
            self._expect()

    def on_message_complete(self) -> None:
        """A request is complete."""
        super().on_message_complete()
        self._arrived()

    def shutdown(self) -> None:
        """The server ends: a request under way is answered, even if nothing of it has been read yet."""
        if self.cycle is None or self.cycle.response_complete:
            self._leaving = True
            self.loop.call_later(LEAVING_SECONDS, self._leave)
        else:
            super().shutdown()

    def _leave(self) -> None:
        # A turn later: a loop that was busy all the time first reads what has come meanwhile.
        self.loop.call_later(0, super().shutdown)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._arrived()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._arrived()
        self._late = self.loop.call_later(WAIT_SECONDS, self.transport.abort)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Flow(FlowControl):
    """Uvicorn's, but nothing is read while requests wait: it would read on after each answer, and store all of it."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class _Corked:
    """A transport that joins the writes of a turn of the event loop, and is closed if the client does not read."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._written = 0
        self._watched = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def write_eof(self) -> None:
        self._send()
        self._transport.write_eof()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)
            self._written += sum(map(len, parts))
            if not self._watched:
                self._watched = True
                self._watch()

    def _watch(self) -> None:
        """Looks again later, if the system's buffer is full."""
        left = self._transport.get_write_buffer_size()
        self._watched = left > 0
        if left:
            self._loop.call_later(WAIT_SECONDS, self._look, self._acknowledged(left) + min(left, ACKNOWLEDGED))

    def _look(self, least: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left and self._acknowledged(left) < least:
            self._transport.abort()
        else:
            self._watch()

    def _acknowledged(self, left: int) -> int:
        """Bytes that have arrived at the client: the system buffers megabytes, and the next ones long after."""
        under_way = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self._written - left - int.from_bytes(under_way, sys.byteorder)
