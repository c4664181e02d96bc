"""Check that declared lookbacks are long enough. If one is too short, a build of a range computes wrong features."""

from isthmus.features.contract.diff import duration_text
from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY, Days, day_name
from isthmus.features.definition.spec import FeatureView
from isthmus.features.errors import DataError
from isthmus.features.offline.dayfiles import DayFiles
from isthmus.features.offline.spool import DaySpool
from isthmus.transforms import sources
from isthmus.transforms.views.compute import Frames, stream_view
from isthmus.transforms.views.difference import difference, sort_rows
from isthmus.transforms.views.executorbuild import compare

# Number of steps whose lookback is checked. One is not enough: before the first step there may be no rows.
CHECKED = 2


def source_reach(reach: int) -> int:
    """Return how far a build reads its sources before and after the days that it computes, in microseconds.

    `reach` is the lookback that the view declares, in microseconds. The result is longer, so that `require_enough` can
    check the lookback.
    """
    # `require_enough` reads twice as far, or a day farther if the lookback is shorter than a day.
    return reach + max(reach, DAY)


def limit_sources(view: FeatureView, frames: Frames, days: Days, reach: int) -> Frames:
    first, end = days.first * DAY - reach, days.end * DAY + reach
    own = {source.name: sources.narrow(frames[source.name], source, first, end) for source in view.sources}
    return {**frames, **own}


def require_enough(
    view: FeatureView, contract: ViewContract, frames: Frames, rows: DaySpool | DayFiles, part: Days | None = None
) -> None:
    """Check that the lookback a view declares is long enough; raise DataError if a longer one gives other rows.

    `rows` has the rows just built. Computes their first day again, or the first day in `part`. To compute a range of
    days, a build uses the rows of the sources from one lookback before its first day until one lookback after its last.
    The longer lookback is twice the declared one, and at least a day longer. A lookback that is too short only on later
    days is not detected. Does nothing if the view has no lookback or there are no rows. `frames` has the rows of the
    sources, at least as far as the longer lookback reaches.
    """
    days = sorted(rows.days) if isinstance(rows, DayFiles) else rows.days()
    days = days if part is None else [day for day in days if day in part]
    if contract.lookback is None or not days:
        return
    # The first day, because it has the fewest earlier source rows.
    day = Days(days[0], days[0] + 1)
    wider, within = limit_sources(view, frames, day, source_reach(contract.lookback)), (day.first * DAY, day.end * DAY)
    if isinstance(rows, DayFiles):
        found = compare(view, contract, limit_sources(view, frames, day, contract.lookback), wider, within)
    else:
        declared = sort_rows(contract, list(rows.groups(day)))
        found = difference(contract, declared, sort_rows(contract, list(stream_view(view, contract, wider, within))))
    if found:
        reach = duration_text(contract.lookback) if contract.lookback else "0"
        raise DataError(
            f"view {view.name}",
            f"reads beyond its lookback of {reach}: with a longer one, on {day_name(days[0])}, {found}",
            expected="the same rows",
            remedy="declare a longer lookback, or none, or remove what is random in its function",
        )  # fmt: skip
