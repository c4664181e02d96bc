"""The outputs of a teacher for the rows of a data set: read where they are kept, computed where they are not."""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from isthmus.distill.outputs import shards
from isthmus.distill.outputs.form import Form
from isthmus.distill.outputs.shards import Shard
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Array
from isthmus.features.contract.contract import sha256
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem
from isthmus.features.files import write_atomically

SHARD_BYTES = 64 << 20
"""A shard is published when it holds as much, and so is what waits in memory."""

SHARD_SECONDS = 60.0
"""A shard is published when its first row has waited as long: no more than that of the teacher's work is ever lost."""

SMALL = 4
"""`prune` puts shards together that have less than one part in so many of `SHARD_BYTES`."""

FORMAT = 1

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Of each output its dtype and the sizes of a row."""


class TeacherOutputs:
    """What a teacher says of each row of a data set, computed once.

    `outputs[indexes]` gives float16 (or float32) tensors (rows, ...) by key. Rows whose outputs are kept are gathered
    from memory maps; the teacher is asked for the others, a batch at a time, and its answers are appended. They wait in
    memory until a shard is full (64 MiB, or a minute), `fill` ends, or the block of `with` does: a process that dies
    loses no more. Several processes may fill one folder at a time.

    Outputs are kept under the teacher's fingerprint, the contract, the form and the options; others are in another
    folder. Every output must have the same sizes for every row: pad all batches to one length.

    Args:
        root: folder of all outputs.
        teacher: who is asked; or only its fingerprint, if all outputs are there.
        rows: (n, 16) uint8, the identities of the n rows. Rows of one identity have one output.
        batches: makes what the teacher takes of the rows of an array of indexes.
        contract: hash of the contract under which the rows were made.
        form: how outputs are kept.
        options: what else the outputs depend on, as plain data: tokenizer, length, augmentation.
        batch: how many rows the teacher is asked at once.
        note: is told of shards that are passed over.

    Raises:
        ConfigurationError: an option is no plain data, rows are no identities, or the teacher is not frozen.
    """

    def __init__(
        self,
        root: Path,
        teacher: Teacher | str,
        rows: Array,
        batches: Callable[[Array], Any],
        *,
        contract: str,
        form: Form | None = None,
        options: Mapping[str, Any] | None = None,
        batch: int = 256,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.form, self.batch = form or Form(), batch
        self._teacher, self._batches, self._note = teacher, batches, note
        problems = [] if batch > 0 else [Problem("batch", repr(batch), "at least 1")]
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 16:
            problems.append(Problem("rows", f"{rows.dtype} {rows.shape}", "uint8 (n, 16), as identities() gives them"))
        if problems:
            raise ConfigurationError("teacher outputs", problems)
        key = {
            "format": FORMAT,
            "teacher": teacher if isinstance(teacher, str) else teacher.fingerprint(),
            "contract": contract,
            "form": {"dtype": self.form.dtype, "top_k": self.form.top_k, "temperature": self.form.temperature},
            "options": dict(options or {}),
        }
        try:
            self.path = root / sha256(key)
        except (TypeError, ValueError) as error:
            raise ConfigurationError("teacher outputs", [Problem("options", str(error), "plain data")]) from None
        if not (self.path / "key.json").exists():
            write_atomically(self.path / "key.json", msgspec.json.format(msgspec.json.encode(key)))
        # Rows of one identity are one: `_first` is where it is met first, `_one` which it is of each row.
        named = np.ascontiguousarray(rows).view("S16").reshape(-1)
        self._names, self._first, self._one = np.unique(named, return_index=True, return_inverse=True)
        self._shard = np.full(len(self._names), -1, np.int64)
        self._place = np.zeros(len(self._names), np.int64)
        self._shards: list[Shard] = []
        self._published: dict[str, int] = {}
        self._passed: set[str] = set()
        self._layout: Layout | None = None
        self._open: _Open | None = None
        self.refresh()

    def __len__(self) -> int:
        return len(self._one)

    def __enter__(self) -> "TeacherOutputs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def __getitem__(self, indexes: Any) -> dict[str, Tensor]:
        """The outputs of some rows, in their order, as new tensors on the CPU.

        Raises:
            ConfigurationError: the teacher is not frozen, or does not give what is asked for.
            DataError: an output is not finite, too large for float16 or of other sizes than those before; or it is not
                kept, and there is no teacher to ask.
        """
        if not isinstance(indexes, slice):
            indexes = np.atleast_1d(np.asarray(indexes))
            indexes = indexes if indexes.size else indexes.astype(np.int64)
        wanted = self._one[indexes]
        if (self._shard[wanted] < 0).any():
            self.refresh()
            missing = self._in_order(np.unique(wanted[self._shard[wanted] < 0]))
            for begin in range(0, len(missing), self.batch):
                self._compute(missing[begin : begin + self.batch])
        return {key: torch.from_numpy(array) for key, array in self._gathered(wanted).items()}

    @property
    def missing(self) -> int:
        """How many rows have no output yet."""
        return int((self._shard[self._one] < 0).sum())

    def fill(self, progress: Callable[[str, float], None] = lambda _text, _share: None) -> None:
        """Computes all outputs that are missing, in the order of the rows, and publishes them.

        Args:
            progress: is told how many rows are done, how many a second, and the share.

        Raises:
            ConfigurationError: as `outputs[indexes]` does.
            DataError: the same.
            DependencyError: the disk is full.
        """
        self.refresh()
        todo = self._in_order(np.flatnonzero(self._shard < 0))
        total, began, asked = len(self._shard), time.monotonic(), 0
        while len(todo):
            now, todo = todo[: self.batch], todo[self.batch :]
            self._compute(now)
            asked += len(now)
            if self._open is None:
                # Between shards: what another process has published need not be computed.
                self.refresh()
                todo = todo[self._shard[todo] < 0]
            rate = asked / max(time.monotonic() - began, 1e-9)
            done = total - len(todo)
            progress(f"teacher outputs: {done:,} of {total:,} rows, {rate:,.0f} rows a second", done / total)
        self.flush()

    def flush(self) -> None:
        """Publishes what waits in memory.

        Raises:
            DependencyError: the disk is full, or the folder cannot be written; what is kept there stays.
        """
        if self._open is None:
            return
        waiting = self._open
        try:
            name = shards.write(self.path, waiting.shard())
        except OSError as error:
            raise DependencyError(
                str(self.path),
                f"outputs of the teacher cannot be written: {error}",
                remedy="make room there; rows whose outputs are kept are not computed again",
            ) from error
        self._open = None
        self._published[name] = waiting.number
        with suppress(FileNotFoundError):  # pruned by another process: what is in memory stays
            self._shards[waiting.number] = shards.read(self.path / name)

    def refresh(self) -> None:
        """Takes up the shards that others have published."""
        for name in shards.names(self.path):
            if name in self._published or name in self._passed:
                continue
            try:
                shard = shards.read(self.path / name)
            except FileNotFoundError:  # pruned by another process
                continue
            except ValueError as error:
                self._pass_over(name, f"is damaged, its rows are computed again: {error}")
                continue
            layout = _layout(shard.arrays)
            if self._layout is None:
                self._layout = layout
            if layout != self._layout:
                self._pass_over(name, f"holds {_shown(layout)}, not {_shown(self._layout)}")
                continue
            self._published[name] = len(self._shards)
            self._shards.append(shard)
            self._adopt(shard.rows, len(self._shards) - 1)

    def prune(self, *, others: bool = False) -> int:
        """Removes the outputs of rows that are not in this data set, and damaged shards; puts small ones together.

        What another process has open it keeps; what it asks for next may be computed again.

        Args:
            others: also everything in the same root that is kept under other keys.

        Returns:
            How many rows' outputs were removed, those under other keys not counted.
        """
        self.refresh()
        self.flush()
        # Rows that another shard has too are not counted among those of this one.
        counts = np.bincount(self._shard[self._shard >= 0], minlength=len(self._shards))
        sizes = {name: sum(a.nbytes for a in self._shards[n].arrays.values()) for name, n in self._published.items()}
        small = [name for name, size in sizes.items() if size < SHARD_BYTES // SMALL]
        stale = [name for name, n in self._published.items() if counts[n] < len(self._shards[n].rows)]
        old = set(stale) | (set(small) if len(small) > 1 else set())
        removed = np.unique(np.concatenate([np.empty(0, "S16"), *(self._rows_of(name) for name in stale)]))
        for name in sorted(old):
            held = np.flatnonzero(self._shard == self._published[name])
            for begin in range(0, len(held), self.batch):
                part = held[begin : begin + self.batch]
                self._append(part, self._gathered(part))
        self.flush()
        for name in sorted(old | self._passed):
            with suppress(FileNotFoundError):
                shards.remove(self.path, name)
            if name in old:
                # What is mapped takes room on the disk.
                self._shards[self._published.pop(name)] = Shard(np.empty(0, "S16"), {})
        self._passed.clear()
        if others:
            for folder in self.path.parent.iterdir():
                if folder != self.path and (folder / "key.json").exists():
                    shutil.rmtree(folder)
        return int((~np.isin(removed, self._names)).sum())

    def _compute(self, missing: Array) -> None:
        rows = self._first[missing]
        if isinstance(self._teacher, str):
            raise DataError(
                "teacher outputs",
                f"row {rows[0]} has none, with {self.missing:,} of {len(self):,} in all",
                expected=f"all rows in {self.path}",
                remedy="open the outputs with the teacher itself, and fill() them",
            )
        answers = self._teacher.ask(self._batches(rows), rows=rows.tolist())
        given = self.form.encode(answers, rows, self._teacher.where)
        wrong = [key for key, array in given.items() if len(array) != len(rows)]
        if wrong:
            found = f"{len(given[wrong[0]])} rows of {len(rows)}"
            raise DataError(f"{self._teacher.where}, output {wrong[0]}", found, expected="one for each")
        layout = _layout(given)
        if self._layout is not None and layout != self._layout:
            raise DataError(
                self._teacher.where,
                f"{_shown(layout)} for row {rows[0]}",
                expected=f"{_shown(self._layout)}, as for the rows before",
                remedy="pad all batches to one length",
            )
        self._append(missing, given)

    def _append(self, ones: Array, given: Mapping[str, Array]) -> None:
        if self._open is not None and self._open.free < len(ones):
            self.flush()
        if self._open is None:
            self._layout = _layout(given)
            self._open = _Open(len(self._shards), self._layout, max(len(ones), self.batch))
            self._shards.append(self._open.shard())
        begin = self._open.add(self._names[ones], given)
        self._shard[ones], self._place[ones] = self._open.number, np.arange(begin, begin + len(ones))
        self._shards[self._open.number] = self._open.shard()
        if self._open.free == 0 or time.monotonic() - self._open.began > SHARD_SECONDS:
            self.flush()

    def _adopt(self, rows: Array, number: int) -> None:
        """Notes where the rows of a shard are; the first shard that has a row keeps it."""
        if not len(self._names):
            return
        ones = np.searchsorted(self._names, rows).clip(max=len(self._names) - 1)
        places = np.flatnonzero((self._names[ones] == rows) & (self._shard[ones] < 0))
        self._shard[ones[places]], self._place[ones[places]] = number, places

    def _gathered(self, ones: Array) -> dict[str, Array]:
        numbers, places = self._shard[ones], self._place[ones]
        found = np.unique(numbers)
        if len(found) == 1:
            return {key: array.take(places, axis=0) for key, array in self._shards[found[0]].arrays.items()}
        gathered = {key: np.empty((len(ones), *sizes), kind) for key, (kind, sizes) in (self._layout or {}).items()}
        for number in found:
            here = np.flatnonzero(numbers == number)
            for key, array in self._shards[number].arrays.items():
                gathered[key][here] = array[places[here]]
        return gathered

    def _rows_of(self, name: str) -> Array:
        return self._shards[self._published[name]].rows

    def _in_order(self, ones: Array) -> Array:
        return np.asarray(ones[np.argsort(self._first[ones])])

    def _pass_over(self, name: str, why: str) -> None:
        self._passed.add(name)
        self._note(f"kept outputs {self.path.name[:12]}: {name} {why}")


class _Open:
    """The shard that is being filled, in memory."""

    def __init__(self, number: int, layout: Layout, least: int) -> None:
        self.number, self.began, self._count = number, time.monotonic(), 0
        row = sum(np.dtype(kind).itemsize * int(np.prod(sizes)) for kind, sizes in layout.values())
        capacity = max(least, SHARD_BYTES // max(row, 1))
        # Memory that is not written to is not taken.
        self._rows = np.empty(capacity, "S16")
        self._arrays = {key: np.empty((capacity, *sizes), kind) for key, (kind, sizes) in layout.items()}

    @property
    def free(self) -> int:
        return len(self._rows) - self._count

    def add(self, rows: Array, given: Mapping[str, Array]) -> int:
        """Appends rows, and tells the place of the first."""
        begin, self._count = self._count, self._count + len(rows)
        self._rows[begin : self._count] = rows
        for key, array in given.items():
            self._arrays[key][begin : self._count] = array
        return begin

    def shard(self) -> Shard:
        return Shard(self._rows[: self._count], {key: array[: self._count] for key, array in self._arrays.items()})


def _layout(arrays: Mapping[str, Array]) -> Layout:
    return {key: (array.dtype.str, array.shape[1:]) for key, array in sorted(arrays.items())}


def _shown(layout: Layout) -> str:
    return ", ".join(f"{key} {np.dtype(kind).name} {sizes}" for key, (kind, sizes) in layout.items())
