"""A connection: uvicorn's, but one that does not get on with its request is closed.

A request has a deadline from the moment that its head is there. What comes before and after is not the application's to
see: a connection without a request, a head that dribbles in, the rest of a body whose request has been refused, an
answer that nobody takes, requests that come faster than their answers. Each would hold its place for as long as it
likes, and places are memory, and files, of which a process has a limited number.

The head and the body of an answer, which uvicorn writes one after the other, leave in one packet: each write wakes the
other side, and that is most of what a small answer costs.
"""

import asyncio
import fcntl
import sys
import termios
from collections.abc import Sized
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WAIT_SECONDS = 5.0
"""How long each of them may take; also how long uvicorn keeps a connection between two requests."""

TAKEN = 1 << 16
"""Bytes of an answer that have to be taken in that time, or the rest of it."""

LEAVING_SECONDS = 0.25
"""How long a server that ends looks for a request that was sent before its client could know."""


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    _late: asyncio.TimerHandle | None = None
    _in_head = False
    _leaving = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request has to come."""
        super().connection_made(cast("asyncio.Transport", _Corked(transport, self.loop)))
        self.flow = _Flow(self.transport, self.pipeline)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """The rest of a head has to come, if there is one: most heads come as a whole."""
        super().data_received(data)
        if self._in_head and self._late is None:
            self._expect()

    def on_message_begin(self) -> None:
        """A head begins. What was waited for has come."""
        super().on_message_begin()
        self._arrived()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """From here on the deadline of the request counts."""
        self._in_head = False
        super().on_headers_complete()
        if self._leaving:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """The rest of a body that nobody has waited for has to come, so that the next request can begin."""
        super().on_response_complete()
        if self.cycle.more_body:
            self._expect()

    def on_message_complete(self) -> None:
        """A request is there as a whole."""
        super().on_message_complete()
        self._arrived()

    def shutdown(self) -> None:
        """The server ends: a request that is under way is answered, also if nothing of it has been read yet."""
        if self.cycle is None or self.cycle.response_complete:
            self._leaving = True
            self.loop.call_later(LEAVING_SECONDS, self._leave)
        else:
            super().shutdown()

    def _leave(self) -> None:
        # A turn later: a loop that was busy all the time first reads what has come meanwhile.
        self.loop.call_later(0, super().shutdown)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes any more."""
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
    """Uvicorn's, but nothing is read while whole requests wait: it would read on after each answer, and keep all of it.

    Args:
        transport: the transport.
        waiting: the requests that wait for the one before them.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        """Reads on once the last request has its turn, which may need the rest of its body."""
        if not self._waiting:
            super().resume_reading()


class _Corked:
    """A transport that sends at once what is written in one turn of the event loop, and is closed if nobody takes it.

    Args:
        transport: the transport, which does everything else.
        loop: its event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._written = 0
        self._watched = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends data at the end of this turn."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Closes the connection once everything is sent."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)
            self._written += sum(map(len, parts))
            if not self._watched:
                self._watched = True
                self._watch()

    def _watch(self) -> None:
        """Looks again later, if there is something left that the system does not take."""
        left = self._transport.get_write_buffer_size()
        self._watched = left > 0
        if left:
            self._loop.call_later(WAIT_SECONDS, self._look, self._taken(left) + min(left, TAKEN))

    def _look(self, least: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left and self._taken(left) < least:
            self._transport.abort()
        else:
            self._watch()

    def _taken(self, left: int) -> int:
        """Bytes that have arrived on the other side. The system takes megabytes, and the next ones long after."""
        under_way = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self._written - left - int.from_bytes(under_way, sys.byteorder)
