"""The offline store: the full history of every view, as Delta tables partitioned by the day of the event."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import ColumnProperties, DeltaTable, WriterProperties

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY, Days
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, Problem
from isthmus.features.offline.canonical import (
    by_day,
    canonical_pushes,
    cast,
    declared_schema,
    identity,
    in_order,
    merge,
    rows_not_in,
)
from isthmus.features.offline.commits import Commit, Day, RowSources, StreamPosition, digest
from isthmus.features.offline.dayfiles import BuiltRows, DayFiles, DayTarget
from isthmus.features.offline.delta import HARMLESS, StoredTable, TableErrors
from isthmus.features.offline.history import ViewHistory, table_schema
from isthmus.features.offline.partitions import (
    DAY_COLUMN,
    column_names,
    dataset,
    days_predicate,
    files_by_day,
    listed_files,
    reader,
    remove_days,
    require_readable,
)
from isthmus.features.offline.pushes import FILES, PushLog
from isthmus.features.offline.spool import DaySpool
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.features.values.rows import RowCodec


@dataclass(frozen=True, slots=True)
class TableWrite:
    """The result of writing a table.

    Attributes:
        added: rows after the write minus rows before it.
        changed: False if the table already had these rows, so that nothing was written.
        pushed: number of rows in the built days that come from a push.
        replaced: number of pushed rows that lost to a built row with the same key and times.
    """

    rows: int
    added: int
    version: int
    changed: bool
    pushed: int = 0
    replaced: int = 0


@dataclass(frozen=True)
class Prepared(AbstractContextManager["Prepared"]):
    """Checked rows for `OfflineStore.write`. Use it in a `with` block, whose end deletes temporary files.

    Attributes:
        rows: rows of the days that differ, as they will be stored.
        replaced: days that differ, including days that lose all rows; None to write the whole table.
        ahead: number of rows whose event or known time is in the future.
        pushes: the fields `pushed` and `replaced` of `TableWrite`.
        files: the days in files that are not committed yet; None if `rows` has the days that differ.
    """

    view: ViewContract
    commit: Commit
    before: Commit | None
    table: DeltaTable | None
    rows: DaySpool
    replaced: Sequence[int] | None
    ahead: int = 0
    pushes: tuple[int, int] = (0, 0)
    files: DayFiles | None = None
    spools: ExitStack = field(default_factory=ExitStack, repr=False)

    def __exit__(self, *_: object) -> None:
        self.spools.close()

    @property
    def changes(self) -> bool:
        before = self.before
        if before is None or self.replaced != [] or before.contract != self.commit.contract:
            return True
        # New source types are a change even if the rows are equal: the next range is compared with these types.
        return before.origin.retyped(self.commit.origin)

    @property
    def base(self) -> str:
        return self.commit.base if self.changes or self.before is None else self.before.base


class OfflineStore:
    """The Delta tables of a project, one per view, in a folder or at a URL with deltalake's `storage_options`."""

    def __init__(self, root: str | Path, storage_options: Mapping[str, str] | None = None) -> None:
        self.root = str(root).rstrip("/")
        self.storage_options = dict(storage_options or {}) if "://" in self.root else None

    def path(self, table: str) -> str:
        return f"{self.root}/{table}"

    def prepare(
        self,
        view: ViewContract,
        rows: pa.Table | DaySpool | DayFiles,
        within: Days | None = None,
        *,
        origin: RowSources | None = None,
        done: Sequence[Days] = (),
        now: int = 0,
    ) -> Prepared:
        """Check the rows that a build has computed for a view, and merge the view's pushed rows into them.

        Nothing is written yet: pass the result to `write`. Use it in a `with` block, whose end deletes temporary files.
        Raise ConfigurationError if a stored column does not have the declared type. Raise DataError if two rows have
        the same key and times, or the table is damaged. With `within`, raise ContractMismatch if the table was built
        under another definition.

        Args:
            view: definition of the view.
            rows: all computed rows, or at least those of the days `within`; or the files that `DayTarget.write` wrote
                of them, which are not checked again.
            within: range of days to replace; None to replace the complete history.
            origin: column types and content of the sources, recorded to find out later if they have changed.
            done: ranges of days that the same build has already checked and found unchanged.
            now: time of the build in microseconds since 1970 UTC; later rows are counted in `Prepared.ahead`.
        """
        table, before, rewrite = self._state(view, within)
        old = (before.days or {}) if before else {}
        days: dict[int, Day] = {}
        with ExitStack() as spools:
            differing = spools.enter_context(DaySpool())
            if isinstance(rows, DayFiles):
                files = rows if within is None else rows.part(within)
                days |= {day: file.entry for day, file in files.days.items()}
                ahead, pushes = files.ahead, files.pushes
                if any(not file.path and (rewrite or old.get(day) != file.entry) for day, file in files.days.items()):
                    raise self.stored(view.table).conflict()
            else:
                files = None
                if isinstance(rows, pa.Table):
                    spool = spools.enter_context(DaySpool())
                    spool.add(cast(view, rows, declared_schema(view)))
                    rows = spool
                log = PushLog(self.root, view.table, self.storage_options)
                built = BuiltRows(view, log, now)
                for day, entry, day_rows in built.days(rows, log.days(), within):
                    days[day] = entry
                    if rewrite or old.get(day) != entry:
                        differing.add(day_rows)
                built.duplicates.raise_if_any()
                ahead, pushes = built.ahead, (built.pushed, built.replaced)
            changed = [day for day, entry in days.items() if old.get(day) != entry]
            removed = [day for day in old if day not in days and (within is None or day in within)]
            days |= {day: entry for day, entry in old.items() if within is not None and day not in within}
            commit = Commit.after(before, view.hash, days, within, origin or RowSources(), done, now)
            rewritten = None if rewrite else sorted([*changed, *removed])
            return Prepared(view, commit, before, table, differing, rewritten, ahead, pushes, files, spools.pop_all())

    def _state(self, view: ViewContract, within: Days | None) -> tuple[DeltaTable | None, Commit | None, bool]:
        """Open a view's table for a build; return it with its state, and True if the build must rewrite all days."""
        table = self.stored(view.table).open()
        before = self._commit(view.table, table) if table else None
        if table is not None and (problems := self.type_problems(view, table)):
            raise ConfigurationError(f"offline table of {view.table}", problems)
        if within is not None:
            _require_extendable(view, before)
        rewrite = (
            table is None or before is None or before.days is None or column_names(table) != table_schema(view).names
        )
        return table, before, rewrite

    def day_target(self, view: ViewContract, within: Days | None, now: int) -> DayTarget:
        """Describe a view's table to processes that write its day files. Raises the errors of `prepare`.

        `within` is the range of days to replace, and `now` the time of the build in microseconds since 1970 UTC.
        """
        _, before, rewrite = self._state(view, within)
        old = (before.days or {}) if before and not rewrite else {}
        log = PushLog(self.root, view.table, self.storage_options)
        version = log.version()
        pushed = [day for day in log.days() if within is None or day in within]
        return DayTarget(self.root, self.storage_options or {}, view, old, pushed, version, now)

    def write_days(self, target: DayTarget, rows: DaySpool, within: Days | None = None) -> DayFiles:
        """Write files of days for `prepare` to commit. `within` limits the days of pushed rows. Raises DataError."""
        with self.stored(target.contract.table).writing():
            built, files = target.write(rows, pushed=[day for day in target.pushed if within is None or day in within])
        built.duplicates.raise_if_any()
        return DayFiles({file.day: file for file in files}, built.ahead, (built.pushed, built.replaced))

    def day_paths(self, view: ViewContract, files: DayFiles) -> list[tuple[str, int]]:
        """Return path and day of the files with the rows of built days: new files, and the table's where they stay."""
        paths = [(file.path, day) for day, file in files.days.items() if file.path]
        if len(paths) < len(files.days) and (table := self.stored(view.table).open()) is not None:
            kept = files.days.keys() - {day for _, day in paths}
            paths += [(path, day) for path, _, day in listed_files(table) if day in kept]
        return paths

    def prepare_relabel(self, view: ViewContract) -> Prepared:
        """Prepare a commit, for `write`, that keeps all rows of a view's table and only records the new definition.

        Use this if the change leaves the stored rows valid, which is not checked here. The table must exist.
        """
        table = self.stored(view.table).open()
        assert table is not None  # noqa: S101 - the caller has its commit
        before = self._commit(view.table, table)
        return Prepared(view, replace(before, contract=view.hash), before, table, DaySpool(), [])

    def extendable(self, view: ViewContract) -> Commit | None:
        """Return the last commit of a view's table, to replace single days of it; None if there is no table.

        Raise ContractMismatch if the other days would not match: they were built under another definition of the view,
        or by an early version of Isthmus that did not record days.
        """
        before = self.commit(view)
        _require_extendable(view, before)
        return before

    def write(self, prepared: Prepared) -> TableWrite:
        """Commit the result of `prepare` or `prepare_relabel` to the view's table.

        Do nothing if the rows, the contract and the source types are the table's already. Raise DataError if writing
        fails or another process has written since `prepare`, and DependencyError if object storage does not answer. The
        table is then unchanged.
        """
        view, commit, before, table = prepared.view, prepared.commit, prepared.before, prepared.table
        if not prepared.changes and table is not None:
            return TableWrite(commit.rows, 0, table.version(), False, *prepared.pushes)
        # If no day differs, only the metadata changes: a new contract or new source types.
        if prepared.files is None:
            self._write(table, view, prepared.rows, commit, prepared.replaced)
        else:
            self._commit_files(table, view, prepared.files, commit, prepared.replaced)
        version = 0 if table is None else table.version()
        added = commit.rows - (before.rows if before else 0)
        return TableWrite(commit.rows, added, version, True, *prepared.pushes)

    def _write(
        self, table: DeltaTable | None, view: ViewContract, rows: DaySpool, commit: Commit, days: Sequence[int] | None
    ) -> None:
        """Commit rows: replace `days`, or the whole table if None, or append to it if empty."""
        options: dict[str, Any] = {"mode": "append"}
        if table is None:
            options = {"mode": "error", "partition_by": [DAY_COLUMN.name]}
        elif days is None:
            options = {"mode": "overwrite", "schema_mode": "overwrite", "partition_by": [DAY_COLUMN.name]}
        elif days:
            options = {"mode": "overwrite", "predicate": days_predicate(days)}
        # The file of a day is small: dictionaries would make it larger and slower to read.
        properties = WriterProperties(default_column_properties=ColumnProperties(dictionary_enabled=False))
        stored = self.stored(view.table)
        stored.commit(table, reader(view, rows), commit.metadata(), writer_properties=properties, **options)

    def _commit_files(
        self, table: DeltaTable | None, view: ViewContract, files: DayFiles, commit: Commit, days: Sequence[int] | None
    ) -> None:
        removed, only = None, None if days is None else set(days)
        if table is not None and only is not None:
            with self.reading(view.table):
                removed = remove_days(table, only)
        added = [file.action() for day, file in files.days.items() if only is None or day in only]
        schema = table_schema(view).append(DAY_COLUMN)
        self.stored(view.table).commit_files(table, added, removed, schema, commit.metadata(), DAY_COLUMN.name)

    def extend(self, view: ViewContract, pushed: pa.Table) -> int:
        """Add newly pushed rows to a view's table in one commit, and return by how many rows the table has grown.

        Append the rows to the `PushLog` first, because later builds read them there. If the table already has a row
        with the same key and times, the row with the greater content hash stays. If there is no table, or it was built
        under another definition, nothing is written and the result is 0. Raise DataError on a conflict or an error, and
        DependencyError if object storage does not answer; the table is then unchanged.
        """
        before = self._commit_of(view)
        if before is None:
            return 0
        table, commit = before
        rows = canonical_pushes(view, pushed)
        return self._amend(view, table, commit, rows, lambda stored, own: merge(view, stored, own), commit.origin)

    def replace_rows(self, view: ViewContract, rows: pa.Table, gone: pa.Table, position: StreamPosition) -> int:
        """Write streamed rows to a view's table in one commit, and return by how many rows the table has grown.

        `rows` are rows of `canonical`, in any order. A row replaces the stored row with the same key and times. `gone`
        has the keys and times of stored rows to remove. `position` tells which events the table includes from then on.
        Raise ContractMismatch if the table was built under another definition, and DataError or DependencyError like
        `extend`.
        """
        before = self._commit_of(view)
        if before is None:
            found = "it does not have the rows of the current definition"
            raise ContractMismatch(f"offline table of {view.table}", found, remedy="run `isthmus build`")
        names = identity(view)

        def replaced(stored: pa.Table, own: pa.Table) -> tuple[pa.Table, int]:
            kept = rows_not_in(
                stored, pa.concat_tables([own.select(names), gone.select(names).cast(own.select(names).schema)])
            )
            order = [(name, "ascending") for name in names]
            group = merge(view, kept, own)[0] if len(own) else kept.sort_by(order)
            return group, len(stored) - len(kept) - _equal_rows(stored, own)

        days_of_gone = {int(day) for day in micros(gone["event_timestamp"]) // DAY}
        origin = replace(before[1].origin, position=position)
        return self._amend(view, *before, in_order(view, rows), replaced, origin, days_of_gone)

    def _commit_of(self, view: ViewContract) -> tuple[DeltaTable, Commit] | None:
        table = self.stored(view.table).open()
        before = self._commit(view.table, table) if table else None
        if table is None or before is None or before.contract != view.hash or before.days is None:
            return None
        return table, before

    def _amend(  # noqa: PLR0913 - both kinds of rows are written alike
        self, view: ViewContract, table: DeltaTable, before: Commit, rows: pa.Table,
        combine: Callable[[pa.Table, pa.Table], tuple[pa.Table, int]], origin: RowSources, also: Collection[int] = (),
    ) -> int:  # fmt: skip
        """Commit rows to their days. `combine` returns the day's rows afterward, and how many stored rows are replaced.

        `also` has further days whose stored rows `combine` may remove.
        """
        path, names = self.path(view.table), [field.name for field in table_schema(view) if not field.nullable]
        days, parts, rewrite = dict(before.days or {}), dict[int, pa.Table](), False
        own_rows = by_day(view, rows)
        with DaySpool() as spool:
            with self.reading(view.table):
                files = files_by_day(table)
                for day in sorted({*own_rows, *(day for day in also if day in days)}):
                    if day not in files:
                        days[day], parts[day] = own_rows[day]
                        continue
                    own = own_rows[day][1] if day in own_rows else rows.slice(0, 0)
                    # Compare without the values: usually a few rows are added to many.
                    stored = dataset(table, path, [day]).to_table(columns=names).cast(own.select(names).schema)
                    group, outdone = combine(stored, own.select(names))
                    entry = Day(len(group), digest(group))
                    if entry != days.get(day):
                        # Skip rows that are already stored, and rows that a stored row beats.
                        lost = rows_not_in(own.select(names), group)
                        days[day], parts[day] = entry, rows_not_in(rows_not_in(own, stored), lost)
                        rewrite |= outdone > 0 or files.get(day, 0) >= FILES
                for day, own in parts.items():
                    if rewrite:
                        whole = dataset(table, path, [day]).to_table().select(own.column_names).cast(own.schema)
                        own = combine(whole, own)[0]
                    spool.add(own)
            if not parts and origin == before.origin:
                return 0
            days = {day: entry for day, entry in days.items() if entry.rows}
            commit = replace(Commit.of(view.hash, days, before.until, origin, before.done), built=before.base)
            self._write(table, view, spool, commit, sorted(parts) if rewrite else [])
        return commit.rows - before.rows

    def commit(self, view: ViewContract, version: int | None = None) -> Commit | None:
        """Return the state of a view's table that Isthmus recorded with a Delta version, or None without a table.

        `version` is by default the newest. This also works if the table was built under another definition of the view,
        to compare the two. Raise DataError if the table is damaged, or another tool has changed its rows.
        """
        table = self.stored(view.table).open(version)
        return None if table is None else self._commit(view.table, table)

    def require_unaltered(self, history: ViewHistory) -> None:
        view = history.view
        with self.reading(view.table):
            rows = history.table()
            values = {column.name: from_arrow(rows[column.name], column.dtype) for column in view.fields}
            altered = np.flatnonzero(RowCodec(view).content(values, len(rows)) != rows["content_hash"].to_numpy())
            if len(altered):
                raise OSError(f"{len(altered)} of {len(rows)} rows differ from what was written")

    def base(self, view: ViewContract) -> str:
        """Return the hash of the rows that the last build of a view's table wrote. Later pushed rows do not change it.

        A deployment records it, to tell later if the table was rebuilt. Raise ContractMismatch if the table was built
        under another definition, and DataError if it is missing or damaged.
        """
        return self._built(view)[1].base

    def history(self, view: ViewContract, version: int | None = None) -> ViewHistory:
        """Open a view's table, with all rows ever built or pushed, at a Delta version, by default the newest.

        This reads no rows yet. Raise ContractMismatch if the table was built under another definition of the view, and
        DataError if it is missing or damaged.
        """
        table, commit = self._built(view, version)
        with self.reading(view.table):
            return ViewHistory(view, dataset(table, self.path(view.table)), table.version(), commit)

    def _built(self, view: ViewContract, version: int | None = None) -> tuple[DeltaTable, Commit]:
        table = self.stored(view.table).open(version)
        if table is None:
            raise DataError(f"offline table of {view.table}", f"nothing at {self.path(view.table)}",
                            remedy="run `isthmus build` first")  # fmt: skip
        commit = self._commit(view.table, table)
        if commit.contract != view.hash:
            raise ContractMismatch(f"offline table of {view.table}",
                                   f"built under {commit.contract[:12]}: the definition changed since the last build",
                                   expected=view.hash[:12], remedy="run `isthmus build`")  # fmt: skip
        with self.reading(view.table):
            require_readable(table)
        return table, commit

    def type_problems(self, view: ViewContract, table: DeltaTable | None = None) -> list[Problem]:
        table = table or self.stored(view.table).open()
        if table is None:
            return []
        with self.reading(view.table):
            types = {column.name: column.type for column in pa.schema(table.schema().to_arrow())}
        remedy = f"declare the view with version={view.version + 1}, which starts a new table"
        return [
            Problem(
                f"view {view.name}, {column.name}", f"its table holds {types[column.name]}", str(column.type), remedy
            )
            for column in table_schema(view)
            if types.get(column.name, column.type) != column.type
        ]

    def reading(self, table: str) -> AbstractContextManager[None]:
        return self.stored(table).reading()

    def stored(self, table: str) -> StoredTable:
        errors = TableErrors(
            f"offline table of {table}",
            damaged="it is incomplete or damaged: remove that folder and run `isthmus build` to recompute it",
            conflict=(
                "another process wrote to it at the same moment",
                "no rows are damaged: try again after the other run ends",
            ),
            unwritten="its rows are unchanged: fix the cause, then try again",
        )
        return StoredTable(self.root, table, self.storage_options, errors, versions=True)

    def _commit(self, name: str, table: DeltaTable) -> Commit:
        """Return the last commit by Isthmus, also before an OPTIMIZE or VACUUM. Raise DataError for other changes."""
        with self.reading(name):
            for back in range(1, table.version() + 2):
                # At an older version, deltalake lists the commits from the newest down to that version.
                entries = self.stored(name).commits(table, back)
                if len(entries) < back:
                    break
                if commit := Commit.read(entries[-1]):
                    return commit
                operation = entries[-1].get("operation")
                if operation not in HARMLESS:
                    break
            else:
                operation = None
            if not entries:
                raise OSError("its last commit is empty")
        raise DataError(
            f"offline table of {name}", f"{self.path(name)} was written by another tool ({operation})",
            expected="commits of `isthmus build`",
            remedy="remove that folder and run `isthmus build` to recompute it",
        )  # fmt: skip


def _equal_rows(rows: pa.Table, others: pa.Table) -> int:
    return len(rows) - len(rows_not_in(rows, others))


def _require_extendable(view: ViewContract, before: Commit | None) -> None:
    where, remedy = f"offline table of {view.table}", f"run `isthmus build {view.name}` without a range first"
    if before is not None and before.contract != view.hash:
        raise ContractMismatch(
            where,
            f"built under {before.contract[:12]}: the days outside the range do not match the current definition",
            expected=view.hash[:12], remedy=remedy,
        )  # fmt: skip
    if before is not None and before.days is None:
        raise ContractMismatch(where, "built by an earlier version of Isthmus, which did not store days", remedy=remedy)
