"""The server's log: one JSON object per line on stderr, no stack traces."""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

import orjson
import structlog

from isthmus.serving import keys


def configure() -> None:
    """Sends our own lines, and the warnings of the libraries, to stderr as JSON."""
    shared: list[Any] = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True)]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(_line)],
        logger_factory=structlog.BytesLoggerFactory(sys.stderr.buffer),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _without_trace,
                structlog.processors.JSONRenderer(lambda event, **_: _line(event).decode()),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def request(line: Mapping[str, Any]) -> None:
    """Logs a request. Without the processors of structlog, since there is a line for every request."""
    text = _line({**line, "event": "request", "level": "info", "timestamp": datetime.now(UTC)})
    sys.stderr.buffer.write(text + b"\n")
    sys.stderr.buffer.flush()


def place(error: BaseException) -> str:
    """Where an error was raised, without the stack that led there."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}" if trace else "unknown"


def _line(event: Any, **_: object) -> bytes:
    """A line of the log. It holds the path and the request id of the caller, and either may be a key by mistake."""
    return keys.PATTERN.sub(b"isthmus_...", orjson.dumps(event, option=orjson.OPT_UTC_Z))


def _without_trace(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    trace = event.pop("exc_info", None)
    if isinstance(trace, tuple) and trace[0] is not None:
        event["exception"] = trace[0].__name__
    if str(event["event"]).startswith("Traceback "):
        # Starlette logs a failed start as formatted text: its last line says what went wrong.
        event["event"] = str(event["event"]).rstrip().rpartition("\n")[2]
    return event
