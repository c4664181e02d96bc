"""Run functions on an engine's executors, whose results and errors are plain data."""

import json
from collections.abc import Callable, Iterator, Mapping
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
    remedy: str = "correct it, or its sources' data; nothing was committed",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Pass the partitions of `rows` to `work` on the executors; yield what it passed to `result`.

    Raises the DataError that it passed to `failure`, and DependencyError if an executor lacks a file or this package.
    If the engine refuses the work, raises `refusal` with `remedy`. `place` names the work in errors.
    """
    from pyspark.errors import PySparkException

    try:
        with explain_missing(place):
            results = rows.mapInArrow(work, "result string").toArrow()["result"].to_pylist()
    except PySparkException as error:
        # The error's plan may reveal data that was sent to the executors.
        raise refusal(place, f"the engine refused it: {first_line(error)}", remedy=remedy) from None
    for each in map(json.loads, results):
        if each.pop("error", False):
            raise DataError(each["where"], each["found"], expected=each["expected"], remedy=each["remedy"])
        yield each


def result(value: Mapping[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"result": [json.dumps(value)]})


def failure(error: DataError) -> pa.RecordBatch:
    """Return an error about data as a result: if it were raised, the engine would run the task again."""
    return result({**error.as_dict(), "error": True})
