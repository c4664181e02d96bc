"""The secret with which join keys of private views are hashed, where answers are recorded."""

import secrets
from contextlib import suppress

from isthmus.features.errors import DataError
from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project

_BYTES = 32


def known_secret(project: Project) -> bytes:
    """The secret of a project whose answers have hashes of keys.

    Raises:
        DataError: its file is gone, or damaged.
    """
    file = project.recorded / "key"
    try:
        return _checked(file.read_bytes(), str(file))
    except FileNotFoundError:
        remedy = "restore it: no hash leads back to a key without it"
        raise DataError(str(file), "is not there", expected="the secret of recorded keys", remedy=remedy) from None


def secret(project: Project) -> bytes:
    """The secret of a project, which is made when it is first asked for: without it, no hash leads back to a key.

    Raises:
        DataError: its file is damaged.
    """
    file = project.recorded / "key"
    with suppress(FileNotFoundError):
        return _checked(file.read_bytes(), str(file))
    with project.locked("keys"):
        with suppress(FileNotFoundError):
            return _checked(file.read_bytes(), str(file))
        made = secrets.token_bytes(_BYTES)
        write_atomically(file, made, mode=0o600)
    return made


def _checked(found: bytes, where: str) -> bytes:
    if len(found) != _BYTES:
        remedy = "restore it; if you remove it, keys that were hashed with it cannot be found again"
        raise DataError(where, f"has {len(found)} bytes", expected=f"{_BYTES}", remedy=remedy)
    return found
