"""The causes that an audit reports: what each means, how to fix it, and which of our classes for Feast prevents it."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A cause of differences.

    Attributes:
        meaning: a sentence for the report.
        remedy: next step for the user, an imperative without a period; may be empty.
        setting: section of `feature_store.yaml` whose Isthmus class prevents it, a key of `_LINES`; "" if none does.
    """

    meaning: str
    remedy: str
    setting: str = ""


_LINES = {
    "online_store": "online_store: {type: isthmus.feast.IsthmusOnlineStore, url: 'redis://localhost:6379'}",
    "offline_store": "offline_store: {type: isthmus.feast.IsthmusOfflineStore, types: declared}",
    "batch_engine": "batch_engine: isthmus.feast.IsthmusComputeEngine",
}
_MATERIALIZE = "run `feast materialize` again over the time of these rows"

CAUSES = {
    "stale row": Fault(
        "The store serves an older row of this key.", f"schedule `feast materialize`, or {_MATERIALIZE}", "batch_engine"
    ),
    "missing key": Fault("The source has a row for this key, and the store has none.", _MATERIALIZE, "batch_engine"),
    "missing feature": Fault("The row was written before the view got this feature.", _MATERIALIZE),
    "expired": Fault(
        "The row is older than the view's ttl: reads should return nulls, and joins should keep the entity row.",
        "ignore values whose event time is older than the ttl", "online_store",
    ),
    "late ttl": Fault(
        "The online row has a later time than its event, such as the time of the load, so it expires too late.",
        "write the event time to the store", "batch_engine",
    ),
    "wrong time": Fault(
        "The online row has the latest values and an earlier time, or a source row is in the far future.",
        "write the event time",
    ),
    "wrong time zone": Fault(
        "Online times differ by whole quarters of an hour, or source times are up to 14 hours in the future.",
        "write times with a zone, and run writers and readers of SQLite stores with TZ=UTC",
    ),
    "rounded": Fault(
        "The value was rounded to a floating-point type with fewer digits.",
        "materialize integers without pandas, or declare the type of the source column", "batch_engine",
    ),
    "null as a value": Fault("The source has a null, and the store serves a value.", _MATERIALIZE, "batch_engine"),
    "value lost": Fault("The source has a value, and the store serves null.", _MATERIALIZE, "batch_engine"),
    "another entity's row": Fault(
        "The store serves the row of another key.",
        "look for a writer with wrong or colliding keys, then write the row again",
    ),
    "other value": Fault(
        "No row of the source has this value at this time.", f"find the process that wrote it, or {_MATERIALIZE}"
    ),
    "unknown row": Fault(
        "The source has no row of the key at this time: it was pushed online only, or the source has changed.",
        "push to the source as well, or materialize again",
    ),
    "unknown key": Fault(
        "The source has no row of this key.", "find the process that wrote it, or load its rows into the source"
    ),
    "tie": Fault(
        "Rows of one key have the same times and different values. Which one is served is random.",
        "give them different event or created timestamps", "offline_store",
    ),
    "duplicate rows": Fault("The source has the same row more than once.", "remove the copies"),
    "join": Fault("The offline store's join returns rows or values that differ from the source.", "", "offline_store"),
}  # fmt: skip


def mend(causes: Iterable[str], stores: Iterable[str] = ()) -> str:
    """Return the lines of `feature_store.yaml` that prevent these causes, and those for the settings in `stores`."""
    settings = {CAUSES[cause].setting for cause in causes} | {*stores}
    return "".join(f"{line}\n" for setting, line in _LINES.items() if setting in settings)
