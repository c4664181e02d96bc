"""A uvicorn connection that limits the head of a request, and closes when the client stalls.

The application does not see an idle connection, a slow head, an unread body or an answer that the client does not read:
each could last forever, with its memory and file descriptor. An answer's head and body are sent in one packet.
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
"""Seconds after which a connection is closed that stalls: before its first request, within a head or an unread body, or
while the client does not read its answer."""

IDLE_SECONDS = 75
"""Seconds after an answer before an idle connection is closed. Clients and load balancers reuse connections for a
shorter time (httpx 5 s, AWS 60 s), so that none sends a request just as the server closes."""

ACKNOWLEDGED = 1 << 16
"""Bytes of an answer that the client must acknowledge within `WAIT_SECONDS`, unless less is left."""

REST = 1 << 20
"""Most bytes to read and drop after a head that is too long; beyond them the connection is reset. Closing a connection
with unread data resets it too, and the client loses the answer."""

LEAVING_SECONDS = 0.25
"""Seconds that a closing server waits for requests sent before the client could know."""


class Configuration(uvicorn.Config):
    limits = Limits()


class Connection(HttpToolsProtocol):
    _late: asyncio.TimerHandle | None = None
    _in_head = False
    _leaving = False
    _over = ""
    _fields = _size = _unparsed = _rest = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", _Corked(transport, self.loop)))
        self.flow = _Flow(self.transport, self.pipeline)
        self._expect()

    def data_received(self, data: bytes) -> None:
        if self._over:
            self._rest += len(data)
            if self._rest > REST:
                self.transport.abort()
            return
        most = self._limits.head_bytes
        # The parser does not tell where a field begins, so feed it limited chunks to count all of it.
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
            # The parser buffers a field until it is complete, and a chunk extension has no limit either.
            self._over = f"has more than {self._limits.head_bytes:,} bytes"
            self.send_400_response(self._over)
        elif self._in_head and self._late is None:
            self._expect()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arrived()
        self._in_head = True
        self._fields = self._size = self._unparsed = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value), 1)
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request with status 400, or 431 if its head or trailers are too large; end the connection.

        Does not send a 431 if the response to this request has begun, or if an earlier request has no response yet. The
        connection is then aborted.
        """
        if not self._over:
            super().send_400_response(msg)
            return
        cycle = self.cycle
        if (
            cycle is not None
            and not cycle.response_complete
            and (cycle.response_started or not cycle.more_body or self.pipeline)
        ):
            # The answer has begun, or the client expects the answer to an earlier request first.
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
        """Stop sending but keep reading for a while. A client that is still sending can then read the answer."""
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
        self._in_head, self._unparsed = False, 0
        super().on_headers_complete()
        if self._leaving:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body:
            self._expect()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._arrived()

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._leaving = True
            self.loop.call_later(LEAVING_SECONDS, self._leave)
        else:
            super().shutdown()

    def _leave(self) -> None:
        # Wait one more turn: a busy loop reads pending data first.
        self.loop.call_later(0, super().shutdown)

    def connection_lost(self, exc: Exception | None) -> None:
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
    """Uvicorn's flow control, but without reading while requests wait, because uvicorn would store all of them."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class _Corked:
    """A transport that sends all writes of one event loop turn together, and aborts if the client does not read."""

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
        left = self._transport.get_write_buffer_size()
        self._watched = left > 0
        if left:
            self._loop.call_later(WAIT_SECONDS, self._check, self._acknowledged(left) + min(left, ACKNOWLEDGED))

    def _check(self, least: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left and self._acknowledged(left) < least:
            self._transport.abort()
        else:
            self._watch()

    def _acknowledged(self, left: int) -> int:
        """Return how many sent bytes the client has acknowledged. The buffer of the system may hold megabytes more."""
        under_way = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self._written - left - int.from_bytes(under_way, sys.byteorder)
