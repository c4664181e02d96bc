"""Reads and writes shards: folders of arrays, published atomically and verified before they are read."""

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from isthmus.distill.types import Array
from isthmus.features.files import publish, scratch_folder

ROWS = "_rows"
_RECORD = "shard.json"
_KIND = "shard"
_NAME = re.compile(r"shard-[0-9a-f]{32}")

_verified: set[tuple[tuple[int, ...], ...]] = set()
"""File states of the shards that this process has verified; a state changes when a file is written to."""


@dataclass(frozen=True, eq=False)
class Shard:
    """Teacher outputs of n rows: row identities, (n,) S16, and an array (n, ...) per output key.

    The arrays of a shard that was read from disk are memory maps.
    """

    rows: Array
    arrays: Mapping[str, Array]


class Record(msgspec.Struct, frozen=True):
    rows: int
    sha256: dict[str, str]


def names(folder: Path) -> Iterator[str]:
    yield from sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))


def write(folder: Path, shard: Shard) -> str:
    def fill(fresh: Path) -> None:
        sums = {}
        for key, array in {ROWS: shard.rows, **shard.arrays}.items():
            file = fresh / f"{key}.npy"
            np.save(file, array, allow_pickle=False)
            sums[key] = _sha256(file)
        (fresh / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(Record(len(shard.rows), sums))))

    name = f"shard-{secrets.token_hex(16)}"
    publish(folder / name, fill, scratch_name=_KIND)
    return name


def read(path: Path) -> Shard:
    """Open a shard (a folder of teacher outputs) as memory maps, after checking its SHA-256 sums.

    Raise a FileNotFoundError if the folder does not exist, and a ValueError if it is damaged.
    """
    try:
        record = msgspec.json.decode((path / _RECORD).read_bytes(), type=Record)
        files = {key: path / f"{key}.npy" for key in record.sha256}
        seen = tuple(_state(file) for file in (path / _RECORD, *files.values()))
        if seen not in _verified:
            for key, file in files.items():
                _verify(file, record.sha256[key])
            _verified.add(seen)
        arrays = {key: np.asarray(np.load(file, mmap_mode="r", allow_pickle=False)) for key, file in files.items()}
        rows = arrays.pop(ROWS)
    except (OSError, msgspec.MsgspecError, KeyError, ValueError) as error:
        if not path.exists():
            raise FileNotFoundError(path) from error
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if rows.dtype != "S16" or {len(rows), *map(len, arrays.values())} != {record.rows}:
        raise ValueError(f"its arrays do not have {record.rows} rows each")
    return Shard(rows, arrays)


def remove(folder: Path, name: str) -> None:
    with scratch_folder(folder, f".{_KIND}") as scratch:
        (folder / name).rename(scratch / "old")


def _verify(file: Path, expected: str) -> None:
    if (digest := _sha256(file)) != expected:
        raise ValueError(f"{file.name} has SHA-256 {digest[:12]}…, not {expected[:12]}…")


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _state(file: Path) -> tuple[int, ...]:
    state = file.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
