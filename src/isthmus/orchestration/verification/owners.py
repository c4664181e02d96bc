"""Per-owner snapshot files in the verdict: whether devices accept each file, and the rows of all files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from isthmus.distill.types import spread
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.values.entitykey import decode_values, key_part
from isthmus.package.snapshot.file import SnapshotFile, read_rows
from isthmus.package.snapshot.owners import Lines, Owners, open_owners, text_of
from isthmus.package.snapshot.signature import signed_by
from isthmus.package.verdict import EXAMPLES, FeatureVerdict, ValueDifference

# Owners whose files the reference client gets.
OWNER_FILES = 10


def read_owners(owners: Owners, views: Sequence[ViewContract], public_key: str) -> tuple[SnapshotFile, FeatureVerdict]:
    """Return the rows of all owners' files as one snapshot, and a verdict on the files that no device accepts.

    Raises:
        DataError: the combined file, or the rows that all owners share, cannot be read.
    """
    generation, signed = owners.generation, signed_by(public_key)
    rows: dict[str, dict[bytes, bytes]] = {view.name: {} for view in views}
    of, per_owner = [name for name, _ in generation.header.views], [shared is None for shared in generation.shared]
    if of != [*rows] or per_owner != [generation.column in view.keys for view in views]:
        raise DataError("snapshot", "has other views or another owner")
    own = []
    for view, shared in zip(views, generation.shared, strict=True):
        if shared is None:
            own.append(view)
        else:
            rows[view.name] = _read(view, shared)
    compared, refused = 0, list[ValueDifference]()
    for key, lines, file in owners:
        compared += 1
        problem = "" if signed(file.data) else "is not signed with the project's key, or was altered"
        for view, part in zip(own, lines, strict=True):
            try:
                found = _read(view, part)
            except DataError as error:
                problem = problem or error.found
                continue
            if any(key_part(view.keys, generation.owner[0], row) != key for row in found):
                problem = problem or f"has rows of another {generation.owner[0]}"
            rows[view.name] |= found
        if problem:
            refused.append(ValueDifference(owner_text(key), "a file that devices accept", f"it {problem}"))
    differing = len(refused)
    verdict = FeatureVerdict(compared, differing, np.inf if differing else 0.0, refused[:EXAMPLES])
    return SnapshotFile(generation.header, rows), verdict


def files_of(file: Path, keys: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return files by key for an even sample of the owners in `keys`.

    Raises:
        FileNotFoundError: a newer snapshot has replaced the file.
    """
    with open_owners(file) as owners:
        found = {key: own.data for key in sorted({*keys}) if (own := owners.file(key)) is not None}
    present = [*found]
    return {present[place]: found[present[place]] for place in spread(len(present), OWNER_FILES)} if present else {}


def owner_text(key: bytes) -> str:
    """Return an owner's value as text."""
    (value,) = decode_values(key)
    return text_of(value)


def _read(view: ViewContract, lines: Lines) -> dict[bytes, bytes]:
    data = b"".join(lines)
    rows, place = read_rows(view, len(lines), data)
    if place != len(data):
        raise DataError("snapshot", f"has {len(data) - place} more bytes than its header says")
    return rows
