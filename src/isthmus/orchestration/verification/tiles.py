"""Verification of aggregations: compare the rows of a build with those that `isthmus stream` computes from tiles."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from isthmus.features.contract.schema import Contract
from isthmus.features.days import DAY, LAST
from isthmus.features.offline.canonical import identity
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.orchestration.frames import source_frames
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.sides import ComparedRows
from isthmus.package.verdict import Verdict
from isthmus.transforms.views.compute import stream_view
from isthmus.transforms.views.events import events_frame, events_of, latest
from isthmus.transforms.views.streamable import rows_from_tiles


def compare_tiles(project: Project, contract: Contract, verdict: Verdict) -> None:
    """Compare tiles with the engine for each view with `tiles` and a stream, and add the comparisons to `verdict`.

    Uses the rows of the last day, and the events that they depend on. The names are `VIEW from tiles`. Skips a view
    without events.
    """
    for view in project.definitions.views.values():
        if view.tiling is None or not view.streams:
            continue
        source, compiled, title = view.streams[0], contract.views[view.name], f"{view.name} from tiles"
        with source_frames(project, [view]) as frames, TemporaryDirectory(prefix="isthmus-verify-") as folder:
            end = latest(frames[source.name], source.known_column)
            if end is None:
                verdict.skipped[title] = "its source has no events"
                continue
            first = end - DAY
            events = events_of(frames[source.name], source, first - (compiled.lookback or 0), LAST)
            with events_frame(frames[source.name].sparkSession, events, Path(folder)) as frame:
                batches = list(stream_view(view, compiled, {**frames, source.name: frame}, (first, LAST)))
            if not any(map(len, batches)):
                verdict.skipped[title] = "the last day of its source has no row"
                continue
            built = pa.concat_tables(batches)
            tiles = rows_from_tiles(view, compiled, source, frames, events, Path(folder))
        names = identity(compiled)
        tiles = tiles.filter(pa.array(micros(tiles["event_timestamp"]) >= first))
        rows = built.join(tiles, names, join_type="full outer", right_suffix="/tiles")
        rows = rows.sort_by([(name, "ascending") for name in names])
        compared = ComparedRows.of(rows, [key.name for key in compiled.keys], micros(rows["event_timestamp"]).tolist())
        verdict.views[title] = {
            name: compared.compare(from_arrow(rows[name], dtype), from_arrow(rows[f"{name}/tiles"], dtype), dtype)
            for name, dtype in ((column.name, column.dtype) for column in compiled.fields)
        }
