"""Build a view on an engine's executors, which compute, check and write whole days. This process lists the files."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import ViewContract
from isthmus.features.definition.expectations import Expectation
from isthmus.features.definition.spec import FeatureView
from isthmus.features.errors import DataError
from isthmus.features.offline.canonical import Duplicates
from isthmus.features.offline.dayfiles import DayFile, DayFiles, DayTarget
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.partitions import dataset_of
from isthmus.features.offline.spool import DaySpool
from isthmus.features.quality.validation import Finding, ReferenceStatistics, check
from isthmus.transforms.tables.stored import using
from isthmus.transforms.views.compute import Frames, RowChecks, view_frame
from isthmus.transforms.views.difference import difference, sort_rows
from isthmus.transforms.views.executors import failure, result, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WIDER = "_wider"


def write_days(view: FeatureView, frames: Frames, target: DayTarget, within: tuple[int, int] | None = None) -> DayFiles:
    """Compute the rows of a view on the engine's executors, which write the files of the days that differ.

    `within` limits the event times, as in `stream_view`. Nothing is committed: pass the result to
    `OfflineStore.prepare`. Raises the errors of `stream_view`, and DependencyError if an executor cannot use the
    offline store or lacks this package. After an error, new files stay in the table's folder. No reader finds them, and
    `isthmus maintain` removes them.
    """
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    contract = target.contract
    place, frame = view_frame(view, contract, frames, within)
    days: dict[int, DayFile] = {}
    checks, duplicates = RowChecks(place, contract), Duplicates(contract)
    ahead = pushed = replaced = written = 0
    # All rows of a day are in one task.
    rows = frame.repartition(F.to_date("event_timestamp"))
    for part in run(place, rows, _WriteDays(place, target)):
        checks.nulls.rows += part["rows"]
        for name, count in part["nulls"].items():
            checks.nulls.nulls[name] += count
        duplicates.include(*part["duplicates"])
        ahead, pushed, replaced = ahead + part["ahead"], pushed + part["pushed"], replaced + part["replaced"]
        days |= {each["day"]: DayFile(**each) for each in part["days"]}
        written += len(part["days"])
    checks.finish(empty=within is not None)
    duplicates.raise_if_any()
    if written != len(days):
        found, remedy = "the engine computed rows of one day in two tasks", "run the build again; nothing was committed"
        raise DataError(place, found, expected="one task per day", remedy=remedy)
    if only_pushed := [day for day in target.pushed if day not in days]:
        # Pushed rows are few, and this process collected them.
        with DaySpool() as none:
            built, files = target.write(none, pushed=only_pushed)
        days |= {file.day: file for file in files}
        ahead, pushed, replaced = ahead + built.ahead, pushed + built.pushed, replaced + built.replaced
    return DayFiles(days, ahead, (pushed, replaced))


def check_files(  # noqa: PLR0913 - the parameters of `check`
    spark: "SparkSession", target: DayTarget, view: ViewContract, declared: Sequence[Expectation],  # noqa: ARG001
    files: Sequence[tuple[str, int | None]], *, now: int, references: Sequence[ReferenceStatistics] = (),
) -> list[Finding]:  # fmt: skip
    """Check expectations like `check`, in one task of the engine.

    `files` has paths in the table's folder, each with its day, if known. They need not be committed.
    """
    work = _CheckFiles(target, tuple(files), tuple(declared), now, tuple(references))
    found = run(f"expectations of {target.contract.name}", spark.range(0, 1, 1, 1), work)
    return [msgspec.convert(each, Finding) for each in found]


def compare(view: FeatureView, contract: ViewContract, frames: Frames, wider: Frames, within: tuple[int, int]) -> str:
    """Compute a view from two sets of sources in one task of the engine. Return the first difference, or ""."""
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    (place, rows), (_, others) = (view_frame(view, contract, each, within) for each in (frames, wider))
    both = rows.withColumn(_WIDER, F.lit(False)).unionByName(others.withColumn(_WIDER, F.lit(True)))
    found = run(place, both.repartition(1), _Compare(place, contract))
    return next((each["difference"] for each in found if each["difference"]), "")


@dataclass(eq=False)
class _WriteDays:
    place: str
    target: DayTarget

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with DaySpool() as rows, using(self.target.root):
            self.target.require_access()
            checks = RowChecks(self.place, self.target.contract)
            try:
                for batch in batches:
                    if (table := checks.checked(pa.Table.from_batches([batch]))) is not None:
                        rows.add(table)
                nulls = {name: count for name, count in checks.nulls.nulls.items() if count}
                built, files = self.target.write(DaySpool() if nulls else rows)
            except DataError as error:
                yield failure(error)
                return
            found = built.duplicates
            yield result({
                "rows": checks.nulls.rows, "nulls": nulls, "duplicates": [found.count, found.first, found.day],
                "ahead": built.ahead, "pushed": built.pushed, "replaced": built.replaced,
                "days": [asdict(file) for file in files],
            })  # fmt: skip


@dataclass(eq=False)
class _CheckFiles:
    target: DayTarget
    files: Sequence[tuple[str, int | None]]
    expectations: Sequence[Expectation]
    now: int
    references: Sequence[ReferenceStatistics]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        view = self.target.contract
        for _ in batches:
            with using(self.target.root):
                data = dataset_of(self.files, table_schema(view), self.target.files())
                for finding in check(view, self.expectations, data, now=self.now, references=self.references):
                    yield result(msgspec.to_builtins(finding))


@dataclass(eq=False)
class _Compare:
    place: str
    contract: ViewContract

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sides: tuple[list[pa.Table], list[pa.Table]] = [], []
        checks = RowChecks(self.place, self.contract)
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            for wider, side in enumerate(sides):
                part = rows.drop_columns([_WIDER]).filter(pc.equal(rows[_WIDER], bool(wider)))
                if (checked := checks.checked(part)) is not None:
                    side.append(checked)
        declared, doubled = (sort_rows(self.contract, side) for side in sides)
        yield result({"difference": difference(self.contract, declared, doubled)})
