"""Outputs of a teacher as versioned data: logits and the facts about the model that made them, never the model."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from isthmus.features.files import publish


class Outputs(msgspec.Struct, frozen=True, eq=False):
    """What a teacher said about every row, and what it costs to ask it.

    Attributes:
        logits: float32, one per row.
        parameters: numbers the learner chose.
        bytes: size of its arrays.
        p50_us: median time of one prediction on one thread, in microseconds.
        p99_us: 99th percentile of it.
    """

    logits: np.ndarray[Any, Any]
    parameters: int
    bytes: int
    p50_us: float
    p99_us: float


class Record(msgspec.Struct, frozen=True):
    """The facts beside `logits.npy`."""

    key: dict[str, Any]
    rows: int
    sha256: str
    parameters: int
    bytes: int
    p50_us: float
    p99_us: float


def digest(parts: Mapping[str, Any]) -> str:
    """SHA-256 of plain data in one canonical form."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def cached(
    cache: Path, key: Mapping[str, Any], rows: int, compute: Callable[[], Outputs], note: Callable[[str], None]
) -> Outputs:
    """The outputs kept under a key, or those of `compute`, which are then kept.

    Args:
        cache: folder of all outputs.
        key: everything the outputs depend on, as plain data.
        rows: how many logits there must be.
        compute: makes the outputs.
        note: is told where the outputs come from, and what is wrong with kept ones that cannot be used.
    """
    folder = cache / digest(key)
    if folder.exists():
        try:
            outputs = _read(folder, rows)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            note(f"kept outputs are damaged and made again: {folder}: {error}")
        else:
            note(f"kept outputs {folder.name[:12]}")
            return outputs
    outputs = compute()
    publish(folder, lambda fresh: _write(fresh, key, outputs))
    return outputs


def _read(folder: Path, rows: int) -> Outputs:
    record = msgspec.json.decode((folder / "record.json").read_bytes(), type=Record)
    file = folder / "logits.npy"
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != record.sha256:
        raise ValueError(f"logits.npy has SHA-256 {found}, not {record.sha256}")
    logits = np.load(file, mmap_mode="r", allow_pickle=False)
    if logits.shape != (rows,) or record.rows != rows or logits.dtype != np.float32:
        raise ValueError(f"logits.npy holds {logits.dtype} {logits.shape}, not float32 ({rows},)")
    return Outputs(logits, record.parameters, record.bytes, record.p50_us, record.p99_us)


def _write(folder: Path, key: Mapping[str, Any], outputs: Outputs) -> None:
    file = folder / "logits.npy"
    np.save(file, outputs.logits, allow_pickle=False)
    record = Record(
        dict(key),
        len(outputs.logits),
        hashlib.sha256(file.read_bytes()).hexdigest(),
        outputs.parameters,
        outputs.bytes,
        outputs.p50_us,
        outputs.p99_us,
    )
    (folder / "record.json").write_bytes(msgspec.json.format(msgspec.json.encode(record)))
