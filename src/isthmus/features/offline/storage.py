"""Object storage: what an error of it means, which is no damage of a table."""

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
"""In what deltalake says of a storage that refuses or does not answer."""

_MARK, _RECENT = "isthmus.commit", 10


def unavailable(where: str, place: str, error: BaseException) -> DependencyError | None:
    """The error to raise instead, if a storage refused a request or did not answer; None for any other error."""
    if "://" not in place or not any(sign in str(error) for sign in _SIGNS):
        return None
    return DependencyError(
        where, f"{place} is not available ({first_line(error)})",
        remedy="its rows are as they were: see storage_options, the bucket, and the credentials in the environment, "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; then run it again",
    )  # fmt: skip


def commits(table: DeltaTable, place: str, count: int) -> list[dict[str, Any]]:
    """Return the last `count` commits of a table, the newest first."""
    found: list[dict[str, Any]] = table.history(count)
    if not found and not is_url(place):
        # deltalake lists none where a folder above has a "#" or a "?" in its name.
        last = range(table.version(), max(table.version() - count, -1), -1)
        with suppress(FileNotFoundError):
            for version in last:
                lines = (Path(place) / "_delta_log" / f"{version:020}.json").read_bytes().splitlines()
                found += [action["commitInfo"] for action in map(json.loads, lines) if "commitInfo" in action]
    return found


def mark() -> dict[str, str]:
    """Metadata that no other commit has."""
    return {_MARK: uuid4().hex}


def committed(place: str, options: Mapping[str, str] | None, metadata: Mapping[str, str]) -> bool:
    """Whether a table in a storage has a commit with this mark: it was made, and the answer was lost.

    The second try of deltalake's meets the first, which looks to it like another writer.
    """
    if "://" not in place:
        return False
    try:
        commits = DeltaTable(place, storage_options=dict(options or {})).history(_RECENT)
    except (DeltaError, OSError):
        return False
    return any(commit.get(_MARK) == metadata[_MARK] for commit in commits)
