"""The server's log: one JSON object per line on stderr, no stack traces.

Without structlog, whose import is a tenth of the time until a server is ready.
"""

import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from isthmus.serving import keys


def configure() -> None:
    """Sends the warnings of the libraries to the log, too."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def info(event: str, **fields: Any) -> None:
    """Logs what happened, with what belongs to it: anything that orjson writes."""
    _write("info", event, fields)


def warning(event: str, **fields: Any) -> None:
    """Logs what somebody should look at."""
    _write("warning", event, fields)


def error(event: str, **fields: Any) -> None:
    """Logs what ends the server."""
    _write("error", event, fields)


def place(error: BaseException) -> str:
    """Where an error was raised, without the stack that led there."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}" if trace else "unknown"


def _write(level: str, event: str, fields: dict[str, Any]) -> None:
    line = _line(level, event, fields) + b"\n"
    # On a full disk, or with nobody who reads it any more, the server goes on.
    with suppress(OSError):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _line(level: str, event: str, fields: dict[str, Any]) -> bytes:
    """A line of the log. It holds the path and the request id of the caller, and either may be a key by mistake."""
    line = {**fields, "event": event, "level": level, "timestamp": datetime.now(UTC)}
    return keys.PATTERN.sub(b"isthmus_...", orjson.dumps(line, option=orjson.OPT_UTC_Z))


class _Formatter(logging.Formatter):
    """The messages of libraries as lines of the log."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = record.getMessage(), {}
        if record.exc_info and record.exc_info[0]:
            fields["exception"] = record.exc_info[0].__name__
        if event.startswith("Traceback "):
            # Starlette logs a failed start as formatted text: its last line says what went wrong.
            event = event.rstrip().rpartition("\n")[2]
        return _line(record.levelname.lower(), event, fields).decode()
