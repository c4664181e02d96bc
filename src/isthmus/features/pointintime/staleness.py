"""`AgedJoin` joins the values that a device sees: its snapshot was made some time before each row's own time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.definition.spec import Snapshot
from isthmus.features.offline.history import ViewHistory, status_column
from isthmus.features.offline.scan import rebatch
from isthmus.features.pointintime.join import BATCH, PASS, Join, apply_ttl, moments
from isthmus.features.types import UnixTimestamp
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.columns import Ints, Mask
from isthmus.features.values.rows import mix

Ages = Callable[[Ints, int], Ints]
"""Takes the times of rows, shape (n,), and the number of the first row. Returns the age of the snapshot at each time.

Times and ages are in microseconds.
"""

Keeps = Callable[[ViewContract, pa.Table], Mask]
"""Takes a view and spine rows. Returns whether the device has the view's rows for their keys, shape (n,)."""

_EVENT = Column("event_timestamp", UnixTimestamp)


class AgedJoin:
    """Joins to a spine (table of training examples) the values in a device's snapshot at each row's time.

    It streams like `Join`, and takes its arguments. `ages` gives the age of the device's snapshot at each row's time. A
    key for which `keeps` returns False gets the status not_found; with `keeps` of None, the device has all keys.
    """

    def __init__(  # noqa: PLR0913 - options of a join, by name
        self,
        spine: pa.Schema,
        histories: Sequence[ViewHistory],
        *,
        ages: Ages,
        keeps: Keeps | None = None,
        features: Mapping[str, Sequence[str]] | None = None,
        status: bool = True,
        threads: int = 2,
        reading: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.schema = Join(spine, histories, features=features, status=status).schema
        self._ages, self._keeps, self._status = ages, keeps, status
        self._views = []
        for history in histories:
            view = history.view
            fields = [c for c in view.fields if features is None or c.name in features[view.name]]
            lasting = replace(history, view=replace(view, fields=(*fields, _EVENT), ttl=None))
            join = Join(spine, [lasting], status=False, threads=threads, reading=reading)
            self._views.append((replace(view, fields=tuple(fields)), join))

    def batches(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = 0
        for rows in rebatch(spine, PASS):
            at = moments(rows, first)
            made = pa.array(at - self._ages(at, first)).cast(ARROW[UnixTimestamp.name])
            place = rows.column_names.index("event_timestamp")
            then = rows.set_column(place, rows.schema.field(place), made.cast(rows.schema.field(place).type))
            result = rows
            # The snapshot has the rows that were valid when it was made. A row that has become older than its ttl since
            # then has expired on the device, too.
            for view, join in self._views:
                past = pa.Table.from_batches(join.batches(then.to_batches(), first), join.schema)
                event = past[view.full_name(_EVENT.name)]
                present = pc.is_valid(event)
                if self._keeps is not None:
                    present = pc.and_(present, pa.array(self._keeps(view, rows)))
                answers = apply_ttl(view, rows["event_timestamp"], event, present, past)
                names = [view.full_name(column.name) for column in view.fields]
                for name in [*names, status_column(view)] if self._status else names:
                    result = result.append_column(name, answers[name])
            first += len(rows)
            yield from result.cast(self.schema).combine_chunks().to_batches(max_chunksize=BATCH)


def fixed_ages(age: int | Ints) -> Ages:
    return lambda at, first: np.full(len(at), age) if isinstance(age, int) else age[first : first + len(at)]


def random_ages(device: Snapshot, seed: int = 0) -> Ages:
    """Return random ages of a device's snapshot, for `AgedJoin`, to train on features as old as those on devices.

    Snapshots are made at multiples of `device.every`, and devices use them up to the age `device.age`. The time since
    the device fetched its snapshot is drawn uniformly from 0 to `age - every`. The draw depends only on `seed` and the
    number of the row.
    """
    age, every = device.age // MICROSECOND, device.every // MICROSECOND

    def ages(at: Ints, first: int) -> Ints:
        draws = mix(np.arange(first + 1, first + 1 + len(at), dtype=np.uint64) + np.uint64(seed << 40))
        share = (draws >> np.uint64(11)).astype(np.float64) / 2**53
        fetched = at - (share * (age - every)).astype(np.int64)
        return np.asarray(at - fetched // every * every, np.int64)

    return ages
