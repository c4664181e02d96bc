"""Digests of values: 64 bits per row, equal for rows that are equal bit by bit."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isthmus.features.values.columns import Values
from isthmus.features.values.rows import mix

Digests = np.ndarray[Any, np.dtype[np.uint64]]


def digests(columns: Mapping[str, Values]) -> Digests:
    """Hash the values of each row to 64 bits, over all columns. Return uint64 of shape (n,).

    Serving records the hashes of the model inputs. Replay computes them again, to find rows whose inputs changed.
    `columns` has the values by column name. Null differs from every value. All NaN values are equal.
    """
    state: Digests = np.zeros(len(next(iter(columns.values())).valid) if columns else 0, np.uint64)
    for name in sorted(columns):
        values = columns[name]
        words = _words(values.data)
        words[~values.valid] = 0
        state = mix(mix(state ^ words) ^ values.valid.astype(np.uint64))
    return state


def tensors_digest(tensors: Mapping[str, np.ndarray[Any, Any]]) -> int:
    named = [f"{name} {array.dtype.str} {array.shape}".encode() for name, array in sorted(tensors.items())]
    words = [_word(array) for _, array in sorted(tensors.items())]
    return _hash(b"\0".join(named) + b"".join(word.to_bytes(8, "little") for word in words))


def text_digest(prompt: Sequence[int], generated: Sequence[int]) -> int:
    return tensors_digest({"prompt": np.array(prompt, np.int64), "generated": np.array(generated, np.int64)})


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _words(data: np.ndarray[Any, Any]) -> Digests:
    if data.dtype == object:
        return np.fromiter(map(_word, data), np.uint64, len(data))
    if data.dtype.kind == "f":
        data = np.where(np.isnan(data), np.array(np.nan, data.dtype), data)
    return np.ascontiguousarray(data).view(f"<u{data.dtype.itemsize}").astype(np.uint64)


def _word(value: Any) -> int:
    match value:
        case None:
            return 0
        case str():
            return _hash(b"s" + value.encode("utf-8", "surrogatepass"))
        case bytes():
            return _hash(b"b" + value)
        case np.ndarray() if value.dtype == object:
            return _word(value.ravel().tolist())
        case np.ndarray():
            return _hash(b"a" + _words(value).tobytes())
    return _hash(b"l" + b"".join(_word(item).to_bytes(8, "little") for item in value))
