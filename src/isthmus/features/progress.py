"""Progress of a long step: a callback that gets a message and the completed share, 0 to 1. `silent` ignores both."""

from collections.abc import Callable

Progress = Callable[[str, float], None]


def silent(text: str, done: float) -> None:
    pass
