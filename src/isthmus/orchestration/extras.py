"""Libraries of an extra are imported where they are used: `with extra("distill"):` says what to install."""

from collections.abc import Iterator
from contextlib import contextmanager

from isthmus.features.errors import DependencyError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports in the block may fail.

    Raises:
        DependencyError: an import failed; the remedy is to install the extra.
    """
    try:
        yield
    except ImportError as error:
        raise DependencyError(
            name, f"cannot be imported ({error})", remedy=f"install it: pip install 'isthmus[{name}]'"
        ) from error
