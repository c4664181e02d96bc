"""A connection: uvicorn's, but one that does not get on with its request is closed.

A request has a deadline from the moment that its head is there. What comes before and after is not the application's to
see: a connection without a request, a head that dribbles in, the rest of a body whose request has been refused. Each
would hold its place for as long as it likes, and places are files, of which a process has a limited number.

The head and the body of an answer, which uvicorn writes one after the other, leave in one packet: each write wakes the
other side, and that is most of what a small answer costs.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WAIT_SECONDS = 5.0
"""How long each of them may take; also how long uvicorn keeps a connection between two requests."""


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    _late: asyncio.TimerHandle | None = None
    _in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request has to come."""
        super().connection_made(cast("asyncio.Transport", _Corked(transport, self.loop)))
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

    def on_response_complete(self) -> None:
        """The rest of a body that nobody has waited for has to come, so that the next request can begin."""
        super().on_response_complete()
        if self.cycle.more_body:
            self._expect()

    def on_message_complete(self) -> None:
        """A request is there as a whole."""
        super().on_message_complete()
        self._arrived()

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


class _Corked:
    """A transport that sends at once what is written in one turn of the event loop.

    Args:
        transport: the transport, which does everything else.
        loop: its event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

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
