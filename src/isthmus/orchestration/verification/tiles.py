"""Verification of aggregations: compare the rows of a build with those that `isthmus stream` computes from tiles."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from isthmus.features.contract.schema import Contract
from isthmus.features.days import DAY, LAST
from isthmus.features.offline.canonical import identity
from isthmus.features.offline.history import index_of_keys
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.orchestration.frames import source_frames
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.sides import ComparedRows
from isthmus.package.verdict import Verdict
from isthmus.transforms.views.compute import stream_view
from isthmus.transforms.views.events import events_frame, events_of, latest
from isthmus.transforms.views.streamable import rows_from_tiles, streamed


def compare_tiles(project: Project, contract: Contract, verdict: Verdict) -> None:
    """Compare tiles with the engine for each view with `tiles` and a stream, and add the comparisons to `verdict`.

    Uses the rows of the last day, and the events that they depend on. The names are `VIEW from tiles`. Skips a view
    without events, or without a lookback, which no stream can follow.
    """
    for view in project.definitions.views.values():
        if view.tiling is None or not streamed(view):
            continue
        source, compiled, title = streamed(view)[0], contract.views[view.name], f"{view.name} from tiles"
        with source_frames(project, [view]) as frames, TemporaryDirectory(prefix="isthmus-verify-") as folder:
            end = latest(frames[source.name], source.known_column)
            if end is None or compiled.lookback is None:
                verdict.skipped[title] = "it has no lookback" if end is not None else "its source has no events"
                continue
            first = end - DAY
            events = events_of(frames[source.name], source, first - compiled.lookback, LAST)
            with events_frame(frames[source.name].sparkSession, events, Path(folder)) as frame:
                batches = list(stream_view(view, compiled, {**frames, source.name: frame}, (first, LAST)))
            if not any(map(len, batches)):
                verdict.skipped[title] = "the last day of its source has no row"
                continue
            built = pa.concat_tables(batches)
            tiles = rows_from_tiles(view, compiled, source, frames, events, Path(folder))
        names = identity(compiled)
        tiles = tiles.filter(pa.array(micros(tiles["event_timestamp"]) >= first))
        rows = pa.concat_tables([built.select(names), tiles.select(names)]).group_by(names).aggregate([])
        rows = rows.sort_by([(name, "ascending") for name in names])
        places = [index_of_keys(side.select(names), rows) for side in (built, tiles)]
        compared = ComparedRows.of(rows, [key.name for key in compiled.keys], micros(rows["event_timestamp"]).tolist())
        left, right = (
            side.take(pa.array(place, mask=place < 0)) for side, place in zip((built, tiles), places, strict=True)
        )
        verdict.views[title] = {
            name: compared.compare(from_arrow(left[name], dtype), from_arrow(right[name], dtype), dtype)
            for name, dtype in ((column.name, column.dtype) for column in compiled.fields)
        }
