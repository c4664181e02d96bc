"""Secret key that hashes the join keys of private views in recorded answers."""

import secrets
from contextlib import suppress

from isthmus.features.errors import DataError
from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project

_BYTES = 32


def known_secret(project: Project) -> bytes:
    """Read the existing secret of a project.

    Raises:
        DataError: the file is missing or damaged.
    """
    file = project.recorded / "key"
    try:
        return _checked(file.read_bytes(), str(file))
    except FileNotFoundError:
        remedy = "restore it: without it, hashes cannot be matched to keys"
        raise DataError(str(file), "does not exist", expected="the secret of recorded keys", remedy=remedy) from None


def secret(project: Project) -> bytes:
    """Return the secret of a project. Creates it on first use.

    Raises:
        DataError: the file is damaged.
    """
    file = project.recorded / "key"
    with suppress(FileNotFoundError):
        return _checked(file.read_bytes(), str(file))
    with project.locked("keys"):
        with suppress(FileNotFoundError):
            return _checked(file.read_bytes(), str(file))
        created = secrets.token_bytes(_BYTES)
        write_atomically(file, created, mode=0o600)
    return created


def _checked(content: bytes, where: str) -> bytes:
    if len(content) != _BYTES:
        remedy = "restore it; if you remove it, hashes of earlier answers cannot be matched to keys"
        raise DataError(where, f"has {len(content)} bytes", expected=f"{_BYTES}", remedy=remedy)
    return content
