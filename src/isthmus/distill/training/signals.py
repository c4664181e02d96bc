"""Records SIGINT and SIGTERM, so that training stops between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Yield a list to which the first SIGINT or SIGTERM is appended, so that training can stop between two steps.

    The signal does not stop the process. Training checks the list after each step and then writes a checkpoint. A
    second signal has its usual effect. Outside the main thread, no signal is caught and the list stays empty.
    """
    caught: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        restore()
        caught.append(number)

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            # None is a handler that was not installed from Python and could not be restored.
            if (handler := signal.getsignal(number)) is not None and handler != signal.SIG_IGN:
                before[number] = handler
                signal.signal(number, note)
    try:
        yield caught
    finally:
        restore()
