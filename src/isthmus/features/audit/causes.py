"""The causes that an audit names: what each means, what to do, and which of our classes for Feast mends it."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of differences: what it means, what to do, and the setting of `feature_store.yaml` that mends it."""

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
    "stale row": Cause(
        "The store serves an older row of the key.", f"schedule `feast materialize`, or {_MATERIALIZE}", "batch_engine"
    ),
    "missing key": Cause("The source has a row of the key, and the store has none.", _MATERIALIZE, "batch_engine"),
    "missing feature": Cause("The row was written before the view got this feature.", _MATERIALIZE),
    "expired": Cause(
        "The row is older than the view's ttl: its values should be null, and the entity row should stay.",
        "stop reading values with an event time older than the ttl", "online_store",
    ),
    "late ttl": Cause(
        "The online row has a later time than its event, such as the time of the load, so its ttl ends too late.",
        "write the event time to the store", "batch_engine",
    ),
    "wrong time": Cause("The online row has the latest values with an earlier time.", "write the event time"),
    "wrong time zone": Cause(
        "The online time, or a time of the source that is in the future, is off by whole quarters of an hour.",
        "write times with a zone, and run writers and readers of SQLite stores with TZ=UTC",
    ),
    "rounded": Cause(
        "The value went through a floating-point number with fewer digits.",
        "materialize integers without pandas, or declare the type that the source has", "batch_engine",
    ),
    "null as a value": Cause("The source has a null, and the store serves a value.", _MATERIALIZE, "batch_engine"),
    "value lost": Cause("The source has a value, and the store serves null.", _MATERIALIZE, "batch_engine"),
    "another entity's row": Cause(
        "The store serves the row of another key.", "look for writers with wrong or colliding keys, and write it again"
    ),
    "other value": Cause("No row of the source has this value at this time.", f"find its writer, or {_MATERIALIZE}"),
    "unknown row": Cause(
        "The source has no row of the key at this time: it was pushed online only, or the source has changed.",
        "push to the source as well, or materialize again",
    ),
    "unknown key": Cause("The source has no row of this key.", "find the writer, or load its rows into the source"),
    "tie": Cause(
        "Rows of one key have the same times and other values. Which one is read is chance.",
        "give them different event or created timestamps", "offline_store",
    ),
    "duplicate rows": Cause("The source has the same row several times.", "remove the copies"),
    "join": Cause("The offline store's join returns other rows or values than the source has.", "", "offline_store"),
}  # fmt: skip


def mend(causes: Iterable[str], stores: Iterable[str] = ()) -> str:
    """Return the lines of `feature_store.yaml` that mend these causes. `stores` are settings that mend others."""
    settings = {CAUSES[cause].setting for cause in causes} | {*stores}
    return "".join(f"{line}\n" for setting, line in _LINES.items() if setting in settings)
