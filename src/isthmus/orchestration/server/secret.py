"""Secret key that hashes the join keys of private views in recorded answers."""

import secrets

from isthmus.features.errors import DataError
from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project

_BYTES = 32


def known_secret(project: Project) -> bytes:
    file = project.recorded / "key"
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        remedy = "restore it: without it, hashes cannot be matched to keys"
        raise DataError(str(file), "does not exist", expected="the secret of recorded keys", remedy=remedy) from None
    if len(content) != _BYTES:
        remedy = "restore it; if you remove it, hashes of earlier answers cannot be matched to keys"
        raise DataError(str(file), f"has {len(content)} bytes", expected=f"{_BYTES}", remedy=remedy)
    return content


def read_or_create_secret(project: Project) -> bytes:
    """Read the secret that hashes private join keys in recorded answers. Create it on first use.

    Only this user can read the file. Raises DataError if it is damaged.
    """
    file = project.recorded / "key"
    if not file.exists():
        with project.locked("keys"):
            if not file.exists():
                write_atomically(file, secrets.token_bytes(_BYTES), mode=0o600)
    return known_secret(project)
