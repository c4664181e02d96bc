"""Guards the import of a library that an extra of Isthmus installs."""

from collections.abc import Iterator
from contextlib import contextmanager

from isthmus.features.errors import DependencyError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Wraps the imports of an extra's libraries.

    Raises:
        DependencyError: an import failed; the remedy is to install the extra.
    """
    try:
        yield
    except ImportError as error:
        raise DependencyError(
            name, f"cannot be imported ({error})", remedy=f"install it: pip install 'isthmus[{name}]'"
        ) from error
