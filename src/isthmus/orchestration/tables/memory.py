"""Build a view within `memory_mb`: compute ranges of days that fit in memory, then write the files of all days."""

from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from isthmus.features.days import DAY, FIRST, LAST, Days, day_of
from isthmus.features.definition.spec import FeatureView
from isthmus.features.offline.dayfiles import DayFiles, DayTarget
from isthmus.features.offline.spool import DaySpool
from isthmus.features.offline.store import OfflineStore
from isthmus.features.progress import Progress
from isthmus.orchestration.settings import PROCESS_MB
from isthmus.orchestration.tables import lookback
from isthmus.transforms.views.compute import Frames, RowChecks, source_rows, stream_view

VALUE = 160
"""Estimated bytes that an engine needs per value of a row: to read, sort and window it, and for the result."""


def write_days(  # noqa: PLR0913 - a view, its data, and where they go
    view: FeatureView, frames: Frames, store: OfflineStore, target: DayTarget, days: Days | None, memory: int,
    progress: Progress,
) -> DayFiles:  # fmt: skip
    """Compute a view's rows, in ranges of days if it has a lookback, and write the files of days. Commit nothing.

    `days` is the range to compute, by default all. `memory` is the engine's memory in bytes. Raises the errors of
    `stream_view`, and DataError if the lookback is too short.
    """
    contract, counts = target.contract, source_rows(view, frames)
    row = VALUE * (2 + sum(column.size or 1 for column in (*contract.keys, *contract.fields)))
    parts, longest = steps(counts, days, contract.lookback, memory // row)
    if longest > memory // row:
        why = "because the view has no lookback" if contract.lookback is None else "with its look-back"
        progress(f"{view.name}: a step reads {longest:,} source rows {why}; the engine may use temporary files. Set "
                 f"memory_mb to {PROCESS_MB - (-2 * longest * row >> 20):,} to avoid this", 0.0)  # fmt: skip
    with DaySpool(memory // 8) as rows:
        for n, part in enumerate(parts):
            if len(parts) > 1:
                progress(f"computing {view.name}, step {n + 1} of {len(parts)}", n / len(parts))
            own, within = frames, None if part is None else (part.first * DAY, part.end * DAY)
            if part is not None and contract.lookback is not None:
                own = lookback.limit_sources(view, frames, part, contract.lookback)
            for table in stream_view(view, contract, own, within):
                rows.add(table)
            if len(parts) > 1 and n < lookback.CHECKED:
                lookback.require_enough(view, contract, frames, rows, part)
        RowChecks(f"view {view.name}", contract).finish(empty=days is not None or rows.rows > 0)
        return store.write_days(target, rows, days)


def steps(counts: Mapping[int, int], days: Days | None, reach: int | None, most: int) -> tuple[list[Days | None], int]:
    """Divide `days` (default: all) into ranges that each read up to `most` source rows.

    Return the ranges, and the number of source rows that the largest one reads. `counts` has the source rows by day.
    `reach` is the lookback in microseconds. A range also reads the days within `reach` of it, and is at least as long,
    so that no row is read many times. It may then exceed `most`. Without a lookback, `days` is the only range.
    """
    if reach is None:
        return [days], sum(counts.values())
    known, reach = np.array(sorted(counts), np.int64), -(-reach // DAY)
    before = np.array([0, *accumulate(counts[day] for day in known)])
    whole = days or Days(min(counts, default=0), max(counts, default=0) + 1)
    ranges, first, longest = list[Days](), whole.first, 0
    while first < whole.end:
        start = int(before[np.searchsorted(known, first - reach)])
        fits = np.searchsorted(before, start + most, "right") - 1
        end = whole.end if fits == len(known) else int(known[fits]) - reach
        ranges.append(Days(first, min(whole.end, max(end, first + max(reach, 1)))))
        first = ranges[-1].end
        longest = max(longest, int(before[np.searchsorted(known, first + reach)]) - start)
    if days is None:
        # Views may return rows before or after the times of their sources.
        ranges[0] = Days(day_of(FIRST), ranges[0].end)
        ranges[-1] = Days(ranges[-1].first, day_of(LAST) + 1)
    return [*ranges], longest
