"""A connection: uvicorn's, but one that does not get on with its request is closed.

A request has a deadline from the moment that its head is there. What comes before and after is not the application's to
see: a connection without a request, a head that dribbles in, the rest of a body whose request has been refused. Each
would hold its place for as long as it likes, and places are files, of which a process has a limited number.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WAIT_SECONDS = 5.0
"""How long each of them may take; also how long uvicorn keeps a connection between two requests."""


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request has to come."""
        super().connection_made(transport)
        self._expect()

    def on_message_begin(self) -> None:
        """The rest of a head has to come."""
        super().on_message_begin()
        self._expect()

    def on_headers_complete(self) -> None:
        """From here on the deadline of the request counts."""
        self._arrived()
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
