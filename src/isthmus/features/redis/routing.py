"""Builds calls of Lua scripts and groups commands by cluster node, without I/O. The API server uses it with asyncio."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha1

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, NoScriptError, TryAgainError

Command = tuple[bytes, ...]
Piece = tuple[Sequence[bytes], Sequence[bytes]]
"""Keys, and one value for each key or no values."""

CHUNK = 1000
"""Keys per call of a script: enough to make round trips rare, few enough not to block Redis."""

FIRST_KEY = 3
"""Index of the first key in a call of a script."""

MOVING = (AskError, TryAgainError, ClusterDownError)  # A MovedError is an AskError.
"""Errors of a node that mean: another node has the key, or will have it soon."""

_ROUND = 1000
"""Calls per batch to a cluster."""

_BLOCK_KEYS, _BLOCK_BYTES = 1 << 16, 1 << 24
"""Keys and bytes to collect for a cluster before sorting by slot: 4 keys per slot take a quarter of the calls."""


class Script:
    """A Lua script that runs over many keys in several calls. The counts that it returns can be summed over the calls.

    The script reads KEYS and ARGV: first the arguments that all keys share, then one value for each key or no values.
    """

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._sha = sha1(self._text, usedforsecurity=False).hexdigest().encode()

    def call(self, arguments: Sequence[bytes], piece: Piece) -> Command:
        keys, values = piece
        return (b"EVALSHA", self._sha, b"%d" % len(keys), *keys, *arguments, *values)

    def with_text(self, call: Command) -> Command:
        return (b"EVAL", self._text, *call[2:])

    def calls(self, arguments: Sequence[bytes], piece: Piece, *, cluster: bool) -> list[Command]:
        batches = by_slot([piece]) if cluster else by_size([piece])
        calls = [self.call(arguments, part) for batch in batches for part in batch]
        return [self.with_text(call) if cluster or not n else call for n, call in enumerate(calls)]

    def after_refusal(self, arguments: Sequence[bytes], call: Command, refusal: Exception) -> list[Command]:
        if isinstance(refusal, NoScriptError):
            return [self.with_text(call)]
        # While a slot moves, its keys are on two nodes.
        values = FIRST_KEY + int(call[2])
        key_values = call[values + len(arguments) :]
        pieces = [([key], key_values[n : n + 1]) for n, key in enumerate(call[FIRST_KEY:values])]
        return [self.with_text(self.call(arguments, piece)) for piece in pieces]


def total(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def by_node(
    commands: Sequence[Command], key: int, owner: Callable[[int], str], places: Iterable[int] | None = None
) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for place in range(len(commands)) if places is None else places:
        nodes.setdefault(owner(key_slot(commands[place][key])), []).append(place)
    return nodes


def by_size(pieces: Iterable[Piece]) -> Iterator[Sequence[Piece]]:
    for piece in pieces:
        for part in _chunks(piece):
            yield [part]


def by_slot(pieces: Iterable[Piece]) -> Iterator[Sequence[Piece]]:
    slots: dict[int, tuple[list[bytes], list[bytes]]] = {}
    count = size = 0
    for keys, values in pieces:
        places = list(map(key_slot, keys))
        for slot in set(places) - slots.keys():
            slots[slot] = ([], [])
        for slot, key in zip(places, keys, strict=True):
            slots[slot][0].append(key)
        for slot, value in zip(places, values, strict=bool(values)):
            slots[slot][1].append(value)
        count += len(keys)
        size += sum(map(len, values))
        if count >= _BLOCK_KEYS or size >= _BLOCK_BYTES:
            yield from _rounds(slots)
            slots, count, size = {}, 0, 0
    yield from _rounds(slots)


def _rounds(slots: Mapping[int, Piece]) -> Iterator[Sequence[Piece]]:
    calls = [part for piece in slots.values() for part in _chunks(piece)]
    for start in range(0, len(calls), _ROUND):
        yield calls[start : start + _ROUND]


def _chunks(piece: Piece) -> Iterator[Piece]:
    keys, values = piece
    for start in range(0, len(keys), CHUNK):
        yield keys[start : start + CHUNK], values[start : start + CHUNK]
