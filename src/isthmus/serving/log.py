"""Write the server's log: one JSON object per line on stderr, without stack traces."""

import logging  # structlog would take 10 % of the startup time
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from isthmus.serving import keys


def configure() -> None:
    """Send warnings and errors of libraries to the server's log. Replaces the handlers of Python's root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def info(event: str, **fields: Any) -> None:
    _write("info", event, fields)


def warning(event: str, **fields: Any) -> None:
    _write("warning", event, fields)


def error(event: str, **fields: Any) -> None:
    _write("error", event, fields)


def place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}" if trace else "unknown"


def _write(level: str, event: str, fields: dict[str, Any]) -> None:
    line = _line(level, event, fields) + b"\n"
    # Keep serving if the disk is full or the reader of stderr is gone.
    with suppress(OSError):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _line(level: str, event: str, fields: dict[str, Any]) -> bytes:
    """Encode a log line, and redact API keys, which a path or request id may contain by mistake."""
    line = {**fields, "event": event, "level": level, "timestamp": datetime.now(UTC)}
    return keys.PATTERN.sub(b"isthmus_...", orjson.dumps(line, option=orjson.OPT_UTC_Z))


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, fields = record.getMessage(), {}
        if record.exc_info and record.exc_info[0]:
            fields["exception"] = record.exc_info[0].__name__
        if event.startswith("Traceback "):
            # Starlette logs a failed start as formatted text; its last line is the message.
            event = event.rstrip().rpartition("\n")[2]
        return _line(record.levelname.lower(), event, fields).decode()
