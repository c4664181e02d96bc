"""The offline store: the full history of every view, as Delta tables in a folder or in object storage.

A table is partitioned by the day of the event, in a column that readers do not see. It is written in one Delta commit,
so a reader sees the old rows or the new ones and a killed writer leaves no trace. Each commit carries the contract
hash of the view and a digest of every day's rows: days that are already there are not written again.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import duckdb
import numpy as np
import pyarrow as pa
from deltalake import ColumnProperties, CommitProperties, DeltaTable, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from isthmus.features.contract.contract import ViewContract
from isthmus.features.days import DAY, Days, union
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, Problem
from isthmus.features.offline.canonical import Doubled, ahead_of, by_day, canonical, cast, declared_schema
from isthmus.features.offline.commits import Commit, Day, Origin
from isthmus.features.offline.history import ViewHistory, table_schema
from isthmus.features.offline.partitions import DAY_COLUMN, check_files, column_names, dataset, on, reader
from isthmus.features.offline.spool import Spool
from isthmus.features.values.columns import from_arrow
from isthmus.features.values.rows import RowCodec

_HARMLESS = ("OPTIMIZE", "VACUUM START", "VACUUM END")
"""What other tools may do to a table without changing its rows."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did.

    Attributes:
        rows: rows of the table now.
        added: rows more than before; 0 when nothing was written.
        version: version of the Delta table now.
        changed: whether anything was written.
    """

    rows: int
    added: int
    version: int
    changed: bool

    def as_dict(self) -> dict[str, int | bool]:
        """The machine-readable form."""
        return asdict(self)


@dataclass(frozen=True)
class Prepared:
    """Rows that may become the history of a view, or that of a range of days. Close it, or use it in a `with` block.

    Attributes:
        view: the view.
        commit: what the table will say of itself.
        before: what it says now, if there is one.
        table: the table as it was when the rows were held against it, if there is one.
        rows: the rows of the days that differ, as they will be stored.
        replaced: the days that differ, those that lose all their rows included; None if the table is made anew.
        ahead: how many of the rows have an event or known time that is still to come.
        held: what ends with it: the rows that lie on disk.
    """

    view: ViewContract
    commit: Commit
    before: Commit | None
    table: DeltaTable | None
    rows: Spool
    replaced: Sequence[int] | None
    ahead: int = 0
    held: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held.close()

    @property
    def changes(self) -> bool:
        """Whether the table is not yet what it would be made."""
        before = self.before
        if before is None or self.replaced != [] or before.contract != self.commit.contract:
            return True
        # The same rows of a source whose columns have other types now: the next range is held against these.
        return before.origin.retyped(self.commit.origin)


class OfflineStore:
    """The tables of one project.

    Args:
        root: folder or object-storage URL that holds one Delta table per view.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root).rstrip("/")

    def path(self, table: str) -> str:
        """Where a table is, by the name that the contract of its view gives it."""
        return f"{self.root}/{table}"

    def prepare(
        self,
        view: ViewContract,
        rows: pa.Table | Spool,
        within: Days | None = None,
        *,
        origin: Origin | None = None,
        done: Sequence[Days] = (),
        now: int = 0,
    ) -> Prepared:
        """Checks everything that can keep `rows` from becoming the history of a view; writes nothing.

        Args:
            view: the view.
            rows: keys, `event_timestamp`, `known_at` and features in the types of the view; one row per key and times.
            within: the days to replace, with the rows of these days; None if the rows are the whole history.
            origin: what the rows were computed from.
            done: days that were computed from the same before and turned out as they are.
            now: the present, in microseconds.

        Raises:
            ConfigurationError: a column of the table has another type than the view declares.
            ContractMismatch: a range is to be replaced in a table that another contract made.
            DataError: two rows have the same key and times; or the table at the path is damaged, or no build of
                Isthmus made it.
        """
        table = self._table(view.table)
        before = self._commit(view.table, table) if table else None
        if problems := self.retyped(view):
            raise ConfigurationError(f"offline table of {view.table}", problems, remedy=NEW_VERSION)
        if within is not None:
            self.extendable(view)
        old = (before.days or {}) if before else {}
        anew = before is None or before.days is None or table is None or column_names(table) != table_schema(view).names
        days: dict[int, Day] = {}
        ahead, doubled = 0, Doubled(view)
        with ExitStack() as held:
            if isinstance(rows, pa.Table):
                given = held.enter_context(Spool())
                given.add(cast(view, rows, declared_schema(view)))
                rows = given
            kept = held.enter_context(Spool())
            for part in rows.groups(within):
                group = canonical(view, part)
                doubled.look(group)
                ahead += ahead_of(group, now)
                for day, (entry, those) in by_day(view, group).items():
                    days[day] = entry
                    if anew or old.get(day) != entry:
                        kept.add(those)
            doubled.refuse()
            changed = [day for day, entry in days.items() if old.get(day) != entry]
            gone = [day for day in old if day not in days and (within is None or day in within)]
            days |= {day: entry for day, entry in old.items() if within is not None and day not in within}
            commit = Commit.of(view.hash, days, _until(before, within, now), *_came_of(before, within, origin, done))
            replaced = None if anew else sorted([*changed, *gone])
            return Prepared(view, commit, before, table, kept, replaced, ahead, held.pop_all())

    def extendable(self, view: ViewContract) -> Commit | None:
        """What the table of a view says of itself, if it has one and a range of its days can be replaced.

        Raises:
            ContractMismatch: another contract made it, or an earlier version of Isthmus.
            DataError: it is damaged, or another tool has changed its rows.
        """
        before = self.commit(view)
        where, remedy = f"offline table of {view.table}", f"run `isthmus build {view.name}` without a range first"
        if before is not None and before.contract != view.hash:
            raise ContractMismatch(
                where,
                f"built under {before.contract[:12]}: the days outside of the range are not what the view says today",
                expected=view.hash[:12], remedy=remedy,
            )  # fmt: skip
        if before is not None and before.days is None:
            raise ContractMismatch(where, "an earlier version of Isthmus built it, which knew no days", remedy=remedy)
        return before

    def write(self, prepared: Prepared) -> Written:
        """Makes prepared rows the history of their view, or of their days of it, unless they already are.

        Raises:
            DataError: another process wrote to the table meanwhile, or it cannot be written. It is as it was.
        """
        view, commit, before, table = prepared.view, prepared.commit, prepared.before, prepared.table
        if not prepared.changes and table is not None:
            return Written(commit.rows, 0, table.version(), changed=False)
        where = self.path(view.table)
        # A day's file is small: dictionaries would make it larger, and slower to read.
        # A commit that is not the next one after the table that the rows were held against would lie about the rest.
        form = WriterProperties(default_column_properties=ColumnProperties(dictionary_enabled=False))
        properties = CommitProperties(custom_metadata=commit.metadata(), max_commit_retries=0)
        with _writing(view.table, where):
            rows = reader(view, prepared.rows)
            if table is None:
                write_deltalake(
                    where, rows, partition_by=[DAY_COLUMN.name], commit_properties=properties, writer_properties=form
                )
            elif prepared.replaced is None:
                write_deltalake(
                    table, rows, mode="overwrite", schema_mode="overwrite", partition_by=[DAY_COLUMN.name],
                    commit_properties=properties, writer_properties=form,
                )  # fmt: skip
            elif prepared.replaced:
                write_deltalake(
                    table,
                    rows,
                    mode="overwrite",
                    predicate=on(prepared.replaced),
                    commit_properties=properties,
                    writer_properties=form,
                )
            else:
                # The same rows under another contract, or of other types: only what the table says of itself is new.
                write_deltalake(table, rows, mode="append", commit_properties=properties)
        version = 0 if table is None else table.version()
        return Written(commit.rows, commit.rows - (before.rows if before else 0), version, changed=True)

    def commit(self, view: ViewContract, version: int | None = None) -> Commit | None:
        """What the table of a view says of itself, whatever contract it was built under; None if there is no table.

        Raises:
            DataError: it is damaged, or another tool has changed its rows.
        """
        table = self._table(view.table, version)
        return None if table is None else self._commit(view.table, table)

    def check(self, history: ViewHistory) -> None:
        """Reads a history whole and computes the content hash of every row again.

        Raises:
            DataError: a row is not what was written.
        """
        view = history.view
        with self.reading(view.table):
            rows = history.data if isinstance(history.data, pa.Table) else history.data.to_table()
            values = {column.name: from_arrow(rows[column.name], column.dtype) for column in view.fields}
            altered = np.flatnonzero(RowCodec(view).content(values, len(rows)) != rows["content_hash"].to_numpy())
            if len(altered):
                raise OSError(f"{len(altered)} of {len(rows)} rows are not what was written")

    def history(self, view: ViewContract, version: int | None = None) -> ViewHistory:
        """The history of a view, now or at a version of its table.

        Raises:
            ContractMismatch: the table was built under another contract of the view.
            DataError: there is no table, or it is damaged.
        """
        table = self._table(view.table, version)
        if table is None:
            raise DataError(f"offline table of {view.table}", f"nothing at {self.path(view.table)}",
                            remedy="run `isthmus build` first")  # fmt: skip
        commit = self._commit(view.table, table)
        if commit.contract != view.hash:
            raise ContractMismatch(f"offline table of {view.table}", f"built under {commit.contract[:12]}",
                                   expected=view.hash[:12], remedy="run `isthmus build`")  # fmt: skip
        with _damage(view.table, self.path(view.table)):
            return ViewHistory(view, dataset(table, self.path(view.table)), table.version(), commit)

    def retyped(self, view: ViewContract) -> list[Problem]:
        """The columns of a view's table that have another type than the view declares."""
        table = self._table(view.table)
        if table is None:
            return []
        wanted = table_schema(view)
        with _damage(view.table, self.path(view.table)):
            found = {column.name: column.type for column in pa.schema(table.schema().to_arrow())}
        return [
            Problem(f"view {view.name}, {column.name}", f"its table holds {found[column.name]}", str(column.type))
            for column in wanted
            if found.get(column.name, column.type) != column.type
        ]

    @contextmanager
    def reading(self, view: str) -> Iterator[None]:
        """Turns what a damaged table makes of a scan into one clear error."""
        with _damage(view, self.path(view)):
            yield

    def _table(self, view: str, version: int | None = None) -> DeltaTable | None:
        try:
            with _damage(view, self.path(view)):
                table = DeltaTable(self.path(view), version=version)
                if "://" not in self.root:
                    check_files(table, Path(self.path(view)))
                return table
        except TableNotFoundError:
            return None

    def _commit(self, name: str, table: DeltaTable) -> Commit:
        """What the last commit of ours says of the table at its version."""
        with _damage(name, self.path(name)):
            for back in range(1, table.version() + 2):
                # Of a table at an older version, deltalake lists the commits from the newest one down to that version.
                commits = table.history(back)
                if len(commits) < back:
                    break
                if commit := Commit.read(commits[-1]):
                    return commit
                operation = commits[-1].get("operation")
                if operation not in _HARMLESS:
                    break
            else:
                operation = None
            if not commits:
                raise OSError("its last commit is empty")
        raise DataError(
            f"offline table of {name}", f"{self.path(name)} was written by another tool ({operation})",
            expected="commits of `isthmus build`",
            remedy="remove that folder and run `isthmus build`, which computes it again",
        )  # fmt: skip


NEW_VERSION = "declare the view with the next `version`, which begins a table of its own"


@contextmanager
def _damage(view: str, path: str) -> Iterator[None]:
    try:
        yield
    except TableNotFoundError:
        raise
    except (DeltaError, OSError, pa.ArrowException, duckdb.Error, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"offline table of {view}", f"{path} cannot be read ({first})",
            remedy="it is half-written or damaged: remove that folder and run `isthmus build`, which computes it again",
        ) from error  # fmt: skip


@contextmanager
def _writing(table: str, path: str) -> Iterator[None]:
    """Turns what keeps a table from being written into one clear error: what is there stays as it was."""
    where = f"offline table of {table}"
    try:
        yield
    except CommitFailedError as error:
        raise DataError(
            where, "another process wrote to it at the same moment",
            remedy="its rows are whole: run `isthmus build` again once the other run has ended",
        ) from error  # fmt: skip
    except (DeltaError, OSError, pa.ArrowException, ValueError, RuntimeError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            where, f"{path} cannot be written ({first})",
            remedy="its rows are as they were: mend that, then run `isthmus build` again",
        ) from error  # fmt: skip


def _until(before: Commit | None, within: Days | None, now: int) -> int:
    """How far builds have come after this one."""
    if within is None:
        return now
    return max(before.until if before else 0, min(now, within.end * DAY))


def _came_of(
    before: Commit | None, within: Days | None, origin: Origin | None, done: Sequence[Days]
) -> tuple[Origin, Sequence[Days]]:
    """What the table will say of its sources, and which ranges were built from just that."""
    origin = origin or Origin()
    if within is None or before is None:
        return origin, tuple(union([within, *done])) if within and origin.content else ()
    schemas = {name: {**before.origin.schemas.get(name, {}), **types} for name, types in origin.schemas.items()}
    if not origin.content:
        return Origin(schemas), ()
    earlier = before.done if before.origin.content == origin.content else ()
    return Origin(schemas, origin.content), tuple(union([*earlier, *done, within]))
