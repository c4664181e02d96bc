"""How a long step says where it is: a callback that receives a sentence and the share that is done."""

from collections.abc import Callable

Progress = Callable[[str, float], None]


def silent(text: str, done: float) -> None:
    """A progress that nobody watches."""
