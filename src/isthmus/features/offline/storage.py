"""Object storage: errors that mean it is unavailable, and commits whose reply was lost."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from isthmus.features.errors import DependencyError, first_line
from isthmus.features.files import is_url

_SIGNS = ("Generic S3 error", "lacked the necessary privileges", "<Error><Code>", "Error performing ")
"""Parts of deltalake's error messages when a storage refuses a request or does not answer."""

_MARK, _RECENT = "isthmus.commit", 10


def unavailable(where: str, place: str, error: BaseException) -> DependencyError | None:
    """Return a DependencyError if the storage refused a request or did not answer, or None for other errors."""
    if "://" not in place or not any(sign in str(error) for sign in _SIGNS):
        return None
    return DependencyError(
        where, f"{place} is not available ({first_line(error)})",
        remedy="its rows are unchanged: check storage_options, the bucket, and the credentials in the environment "
        "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), then try again",
    )  # fmt: skip


def commits(table: DeltaTable, place: str, count: int) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = table.history(count)
    if not entries and not is_url(place):
        # deltalake lists no commits if the path contains "#" or "?".
        last = range(table.version(), max(table.version() - count, -1), -1)
        with suppress(FileNotFoundError):
            for version in last:
                lines = (Path(place) / "_delta_log" / f"{version:020}.json").read_bytes().splitlines()
                entries += [action["commitInfo"] for action in map(json.loads, lines) if "commitInfo" in action]
    return entries


def mark() -> dict[str, str]:
    """Return metadata for a commit, by which `committed` recognizes it even if the reply was lost."""
    return {_MARK: uuid4().hex}


def committed(place: str, options: Mapping[str, str] | None, metadata: Mapping[str, str]) -> bool:
    """Return whether a recent commit of a table in a storage has this mark: it was made, and only the reply was lost.

    deltalake's retry then collides with its own first attempt, and reports another writer.
    """
    if "://" not in place:
        return False
    try:
        commits = DeltaTable(place, storage_options=dict(options or {})).history(_RECENT)
    except (DeltaError, OSError):
        return False
    return any(commit.get(_MARK) == metadata[_MARK] for commit in commits)
