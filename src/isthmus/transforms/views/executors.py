"""Run functions on an engine's executors. They return results and errors as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from isthmus.features.errors import DataError, DependencyError
from isthmus.transforms.sources import first_line
from isthmus.transforms.tables.missing import explain_missing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def run(
    place: str, rows: "DataFrame", work: Callable[..., Iterator[pa.RecordBatch]],
    refusal: type[DataError | DependencyError] = DataError,
    remedy: str = "correct it, or the data of its sources; nothing was committed",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Call `work` on the executors with each partition of `rows`; yield the values that it wraps in `result`.

    A generator: nothing runs before the first value is requested. `place` names the work in errors. Raises a DataError
    that `work` wraps in `failure`, DependencyError if an executor lacks a file or this package, and `refusal` with
    `remedy` if the engine fails otherwise.
    """
    with refused(place, refusal, remedy):
        results = rows.mapInArrow(work, "result string").toArrow()["result"].to_pylist()
    for each in map(json.loads, results):
        if each.pop("error", False):
            raise DataError(each["where"], each["found"], expected=each["expected"], remedy=each["remedy"])
        yield each


@contextmanager
def refused(place: str, refusal: type[DataError | DependencyError], remedy: str) -> Iterator[None]:
    """Raise `refusal` in place of the engine's errors in the block, and DependencyError as in `run`."""
    from pyspark.errors import PySparkException

    try:
        with explain_missing(place):
            yield
    except PySparkException as error:
        # The error's plan may reveal data that was sent to the executors.
        raise refusal(place, f"the engine refused it: {first_line(error)}", remedy=remedy) from None


def result(value: Mapping[str, Any]) -> pa.RecordBatch:
    """Wrap a result of `work` for `run`."""
    return pa.RecordBatch.from_pydict({"result": [json.dumps(value)]})


def failure(error: DataError) -> pa.RecordBatch:
    """Wrap an error of `work` for `run`. If `work` raised it, the engine would run the task again."""
    return result({**error.as_dict(), "error": True})
