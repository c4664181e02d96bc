"""The outputs of a teacher for the rows of a data set, read from shards and computed where missing."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from isthmus.distill.outputs import shards
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.outputs.shards import Shard
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Array, in_batches
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem
from isthmus.features.files import write_atomically
from isthmus.features.progress import Progress, silent

SHARD_BYTES = 64 << 20
"""A shard is published at this size, which also bounds memory."""

SHARD_SECONDS = 60.0
"""A shard is published when its first row is this old, so that a crash loses little of the teacher's work."""

SMALL = 4

FORMAT = 1

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""The dtype of each output and its sizes per row."""


class OutputCache:
    """The outputs of a teacher for each row of a data set, computed once.

    `outputs[indexes]` returns float16 (or float32) tensors (rows, ...) by key. Cached rows are gathered from memory
    maps; the teacher computes missing rows, a batch at a time. New outputs stay in memory until their shard is 64 MiB
    or a minute old, `fill` ends, or the `with` block ends. A process that is killed loses only the outputs in memory.
    Several processes may fill a folder at the same time.

    The outputs are in a subfolder of `root`, named by a hash of the teacher's fingerprint, the contract, the form and
    the options. Creating the object creates the subfolder, and reads and verifies its shards (folders of arrays). Every
    output must have the same sizes for every row: pad all batches to one length.

    Args:
        root: folder for the outputs of all teachers.
        teacher: teacher that computes the outputs; its fingerprint is enough if all outputs are cached.
        rows: (n, 16) uint8, the identities of the n rows. Rows with the same identity share their output.
        batches: creates the teacher's input for an array of row numbers, each from 0 to n - 1.
        contract: hash of the contract (schema of the features) under which the rows were computed.
        form: storage format; float16 logits by default.
        options: further plain data that the outputs depend on, such as tokenizer, length and augmentation.
        batch: rows per call of the teacher.
        note: called with a line of text for each shard that is skipped.

    Raises:
        ConfigurationError: an option is not plain data, `rows` are not identities, `batch` is below 1, or a part of the
            teacher cannot be read for its fingerprint.
    """

    def __init__(  # noqa: PLR0913 - what identifies the outputs, and how they are computed
        self,
        root: Path,
        teacher: Teacher | str,
        rows: Array,
        batches: Callable[[Array], Any],
        *,
        contract: str,
        form: OutputFormat | None = None,
        options: Mapping[str, Any] | None = None,
        batch: int = 256,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.form, self.batch = form or OutputFormat(), batch
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
        with suppress(OSError):
            # `isthmus maintain` deletes outputs that were not used for long.
            (self.path / "key.json").touch()
        # Per distinct identity: first row, shard (-1 if missing) and index in the shard. `_identity` is per row.
        names = np.ascontiguousarray(rows).view("S16").reshape(-1)
        self._names, self._first, self._identity = np.unique(names, return_index=True, return_inverse=True)
        self._shard = np.full(len(self._names), -1, np.int64)
        self._place = np.zeros(len(self._names), np.int64)
        self._shards: list[Shard] = []
        self._published: dict[str, int] = {}
        self._skipped: set[str] = set()
        self._layout: Layout | None = None
        self._open: _Open | None = None
        self.parts: list[OutputCache] = []
        self.refresh()

    def __len__(self) -> int:
        return len(self._identity)

    def __enter__(self) -> "OutputCache":
        return self

    def __exit__(self, *_error: object) -> None:
        self.flush()

    def __getitem__(self, indexes: Any) -> dict[str, Tensor]:
        """Return the outputs of the rows `indexes`, in this order, as new tensors on the CPU, by key.

        Compute missing outputs first, which may write a shard (a folder of arrays) to disk.

        Raises:
            ConfigurationError: the teacher is not frozen, or lacks an output.
            DependencyError: a shard cannot be written, for example because the disk is full.
            DataError: an output is not finite, too large for float16 or of different sizes than before; or it is not
                cached and only a fingerprint is known.
        """
        if not isinstance(indexes, slice):
            indexes = np.atleast_1d(np.asarray(indexes))
            indexes = indexes if indexes.size else indexes.astype(np.int64)
        wanted = self._identity[indexes]
        if (self._shard[wanted] < 0).any():
            self.refresh()
            missing = self._in_order(np.unique(wanted[self._shard[wanted] < 0]))
            for batch in in_batches(missing, self.batch):
                self._compute(batch)
        return {key: torch.from_numpy(array) for key, array in self._gathered(wanted).items()}

    def float32(self, indexes: Any) -> dict[str, Array]:
        """Return the teacher's outputs for some rows as float32 arrays (rows, ...), by key, to measure them.

        `indexes` has row numbers. Missing outputs are computed first, which may write a shard (a folder of arrays) to
        disk.
        """
        return {key: tensor.float().numpy() for key, tensor in self[indexes].items()}

    def compute_from(self, teacher: Teacher, parts: "Sequence[OutputCache]") -> None:
        """Compute missing outputs with `teacher`, which reads `parts`: outputs of other teachers for the same rows.

        The outputs of `parts` are written to disk together with these.
        """
        self._teacher, self.parts = teacher, [*parts]

    @property
    def teacher(self) -> Teacher | str:
        return self._teacher

    @property
    def missing(self) -> int:
        """Number of rows for which the teacher must still compute an output, as of the last `refresh`.

        Outputs in memory and on disk both count as present.
        """
        return int((self._shard[self._identity] < 0).sum())

    def calls(self, first: Any, part: "OutputCache | None" = None) -> tuple[int, int]:
        """Return how many teacher calls are left, and for how many rows, to announce their cost before they are made.

        `first` has the indexes of the rows that the caller reads first, whose outputs are computed in separate batches.
        With `part`, the cache of one of several teachers, count only the calls of that teacher.
        """
        early = np.zeros(len(self._names), bool)
        early[self._identity[first]] = True
        asked = self._shard < 0 if part is None else ~np.isin(self._names, part._names[part._shard >= 0])
        parts = [self._in_order(np.flatnonzero((self._shard < 0) & (early == now))) for now in (True, False)]
        batches = [batch for rows in parts for batch in in_batches(rows, self.batch)]
        return sum(bool(asked[batch].any()) for batch in batches), sum(int(asked[batch].sum()) for batch in batches)

    def fill(self, progress: Progress = silent, *, rank: int = 0, processes: int = 1) -> None:
        """Compute all missing outputs in row order, and write them to disk.

        If an error ends the call early, the outputs so far are still written. Skips rows that other processes write
        meanwhile. `progress` is called with a line of text and the finished share of the rows, 0 to 1. With several
        `processes`, computes only the batches of the process `rank`.

        Raises:
            ConfigurationError: the teacher is not frozen, or lacks an output.
            DataError: an output is not finite, too large for float16 or of different sizes than before; or outputs are
                missing and only the teacher's fingerprint is known.
            DependencyError: a shard cannot be written, for example because the disk is full.
        """
        self.refresh()
        every = self._in_order(np.arange(len(self._shard)))
        # By the place among all rows, because processes may see each other's first shards or not.
        every = every[np.arange(len(every)) // self.batch % processes == rank]
        todo = every[self._shard[every] < 0]
        total, began, computed = len(every), time.monotonic(), 0
        with self:  # publish on errors too: outputs may have cost money
            while len(todo):
                batch, todo = todo[: self.batch], todo[self.batch :]
                self._compute(batch)
                computed += len(batch)
                if self._open is None:
                    # A shard was just published: skip rows that other processes have published meanwhile.
                    self.refresh()
                    todo = todo[self._shard[todo] < 0]
                rate = computed / max(time.monotonic() - began, 1e-9)
                done = total - len(todo)
                progress(f"teacher outputs: {done:,} of {total:,} rows, {rate:,.0f} rows a second", done / total)

    def flush(self) -> None:
        """Write the outputs that are only in memory to disk, so that a crash does not lose them.

        They form a new shard (a folder of arrays). Raises a DependencyError if that fails. The outputs then stay in
        memory.
        """
        for part in self.parts:
            part.flush()
        waiting = self._open
        if waiting is None:
            return
        try:
            name = shards.write(self.path, waiting.shard())
        except OSError as error:
            raise DependencyError(
                str(self.path),
                f"outputs of the teacher cannot be written: {error}",
                remedy="make room there; cached rows are not computed again",
            ) from error
        self._open = None
        self._published[name] = waiting.number
        with suppress(FileNotFoundError):  # pruned by another process; keep the arrays in memory
            self._shards[waiting.number] = shards.read(self.path / name)

    def refresh(self) -> None:
        """Load the outputs that other processes have written since the last call, so that they are not computed again.

        Outputs are stored in shards (folders of arrays). Skips damaged shards, and shards whose outputs have other
        sizes or types, and reports each with the function `note`.
        """
        for name in shards.names(self.path):
            if name in self._published or name in self._skipped:
                continue
            try:
                shard = shards.read(self.path / name)
            except FileNotFoundError:  # pruned by another process
                continue
            except ValueError as error:
                self._skip(name, f"is damaged, its rows are computed again: {error}")
                continue
            layout = _layout(shard.arrays)
            if self._layout is None:
                self._layout = layout
            if layout != self._layout:
                self._skip(name, f"holds {_shown(layout)}, not {_shown(self._layout)}")
                continue
            self._published[name] = len(self._shards)
            self._shards.append(shard)
            self._adopt(shard.rows, len(self._shards) - 1)

    def prune(self, *, others: bool = False) -> int:
        """Free disk space: delete cached outputs that this data set does not need, and merge small shards.

        A shard is a folder of arrays. First writes the outputs in memory to disk. Also deletes the shards that
        `refresh` skipped. Another process keeps the shards that it has open, but may have to compute again what it
        reads next. If `others` is True, also deletes the cached outputs of all other teachers and settings in the
        folder for teacher outputs. Returns the number of deleted rows, without the rows of other teachers and settings.
        """
        self.refresh()
        self.flush()
        # Several shards may have a row; it counts only for the one it is read from.
        counts = np.bincount(self._shard[self._shard >= 0], minlength=len(self._shards))
        sizes = {name: sum(a.nbytes for a in self._shards[n].arrays.values()) for name, n in self._published.items()}
        small = [name for name, size in sizes.items() if size < SHARD_BYTES // SMALL]
        stale = [name for name, n in self._published.items() if counts[n] < len(self._shards[n].rows)]
        old = set(stale) | (set(small) if len(small) > 1 else set())
        rows = [self._shards[self._published[name]].rows for name in stale]
        removed = np.unique(np.concatenate([np.empty(0, "S16"), *rows]))
        for name in sorted(old):
            for batch in in_batches(np.flatnonzero(self._shard == self._published[name]), self.batch):
                self._append(batch, self._gathered(batch))
        self.flush()
        for name in sorted(old | self._skipped):
            with suppress(FileNotFoundError):
                shards.remove(self.path, name)
            if name in old:
                # Unmap the files, since a mapped file keeps its disk space.
                self._shards[self._published.pop(name)] = Shard(np.empty(0, "S16"), {})
        self._skipped.clear()
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
                f"row {rows[0]} has no output; {self.missing:,} of {len(self):,} rows have none",
                expected=f"outputs for all rows in {self.path}",
                remedy="pass the teacher instead of its fingerprint, and call fill()",
            )
        answers = self._teacher.ask(self._batches(rows), rows=rows.tolist())
        arrays = self.form.encode(answers, rows, self._teacher.where)
        for key, array in arrays.items():
            if len(array) != len(rows):
                where, size = f"{self._teacher.where}, output {key}", f"{len(array)} rows for {len(rows)} inputs"
                raise DataError(where, size, expected="one row per input")
        layout = _layout(arrays)
        if self._layout is not None and layout != self._layout:
            raise DataError(
                self._teacher.where,
                f"{_shown(layout)} for row {rows[0]}",
                expected=f"{_shown(self._layout)}, as for the rows before",
                remedy="pad all batches to one length",
            )
        self._append(missing, arrays)

    def _append(self, identities: Array, arrays: Mapping[str, Array]) -> None:
        if self._open is not None and self._open.free < len(identities):
            self.flush()
        if self._open is None:
            self._layout = _layout(arrays)
            self._open = _Open(len(self._shards), self._layout, max(len(identities), self.batch))
            self._shards.append(self._open.shard())
        begin = self._open.add(self._names[identities], arrays)
        self._shard[identities] = self._open.number
        self._place[identities] = np.arange(begin, begin + len(identities))
        self._shards[self._open.number] = self._open.shard()
        if self._open.free == 0 or time.monotonic() - self._open.began > SHARD_SECONDS:
            self.flush()

    def _adopt(self, rows: Array, number: int) -> None:
        if not len(self._names):
            return
        identities = np.searchsorted(self._names, rows).clip(max=len(self._names) - 1)
        places = np.flatnonzero((self._names[identities] == rows) & (self._shard[identities] < 0))
        self._shard[identities[places]], self._place[identities[places]] = number, places

    def _gathered(self, identities: Array) -> dict[str, Array]:
        numbers, places = self._shard[identities], self._place[identities]
        distinct = np.unique(numbers)
        if len(distinct) == 1:
            return {key: array.take(places, axis=0) for key, array in self._shards[distinct[0]].arrays.items()}
        gathered = {
            key: np.empty((len(identities), *sizes), kind) for key, (kind, sizes) in (self._layout or {}).items()
        }
        for number in distinct:
            here = np.flatnonzero(numbers == number)
            for key, array in self._shards[number].arrays.items():
                gathered[key][here] = array[places[here]]
        return gathered

    def _in_order(self, identities: Array) -> Array:
        return np.asarray(identities[np.argsort(self._first[identities])])

    def _skip(self, name: str, why: str) -> None:
        self._skipped.add(name)
        self._note(f"cached outputs {self.path.name[:12]}: {name} {why}")


class _Open:
    def __init__(self, number: int, layout: Layout, least: int) -> None:
        self.number, self.began, self._count = number, time.monotonic(), 0
        row = sum(np.dtype(kind).itemsize * int(np.prod(sizes)) for kind, sizes in layout.values())
        capacity = max(least, SHARD_BYTES // max(row, 1))
        # Cheap: the system allocates pages only when they are written.
        self._rows = np.empty(capacity, "S16")
        self._arrays = {key: np.empty((capacity, *sizes), kind) for key, (kind, sizes) in layout.items()}

    @property
    def free(self) -> int:
        return len(self._rows) - self._count

    def add(self, rows: Array, arrays: Mapping[str, Array]) -> int:
        begin, self._count = self._count, self._count + len(rows)
        self._rows[begin : self._count] = rows
        for key, array in arrays.items():
            self._arrays[key][begin : self._count] = array
        return begin

    def shard(self) -> Shard:
        return Shard(self._rows[: self._count], {key: array[: self._count] for key, array in self._arrays.items()})


def _layout(arrays: Mapping[str, Array]) -> Layout:
    return {key: (array.dtype.str, array.shape[1:]) for key, array in sorted(arrays.items())}


def _shown(layout: Layout) -> str:
    return ", ".join(f"{key} {np.dtype(kind).name} {sizes}" for key, (kind, sizes) in layout.items())
