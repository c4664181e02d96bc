"""SIGINT and SIGTERM, taken in order: noted first, and obeyed where it suits."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Within the block, the first SIGINT or SIGTERM is put into the list; a second one does what it did before.

    Only the main thread may take signals: in another one the list stays empty. A signal that is ignored stays so, as
    SIGINT is in what a shell has put into the background.
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
        # None stands for a handler that is not Python's: it could not be restored.
        before = {
            number: handler
            for number in SIGNALS
            if (handler := signal.getsignal(number)) is not None and handler != signal.SIG_IGN
        }
        for number in before:
            signal.signal(number, note)
    try:
        yield caught
    finally:
        restore()
