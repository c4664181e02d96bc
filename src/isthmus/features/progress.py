"""Progress of a long step: a callback with a sentence and the share that is done."""

from collections.abc import Callable

Progress = Callable[[str, float], None]


def silent(text: str, done: float) -> None:
    """Ignores the progress."""
