"""Compare request features with Feast's on-demand feature views, in pandas mode and in Python mode, in one run.

Twelve expressions over the same rows, on one core. The timed part is the call of each server between lookup and answer:
`RowGraph.run`, from columns to columns, and Feast's `_augment_response_with_on_demand_transforms`, from protobufs to
protobufs. The cost of Feast's function alone, from columns to columns (`transform_arrow`, `transform_dict`), is shown
without a target. The sides alternate, and the quietest round of each counts. First, all results are checked to be
equal: to the bit, floats within `ULPS`.

Run it on an idle machine.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
from feast import Field as FeastField
from feast import RequestSource as FeastRequest
from feast import ValueType
from feast import types as feast_types
from feast.on_demand_feature_view import OnDemandFeatureView
from feast.protos.feast.serving.ServingService_pb2 import FieldStatus, GetOnlineFeaturesResponse
from feast.transformation.pandas_transformation import PandasTransformation
from feast.transformation.python_transformation import PythonTransformation
from feast.type_map import python_values_to_proto_values
from feast.utils import _augment_response_with_on_demand_transforms
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows
from result import Comparison, at_most, less, note, options_parser, report

from isthmus.features.contract.schema import Column, TransformContract, request_column
from isthmus.features.definition.spec import Field, RequestSource, RequestTransform
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import Bool, DataType, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.columns import Values
from isthmus.orchestration.project import Project
from isthmus.transforms.request.compute import compiled

FLIGHTS = Path(__file__).parents[1] / "examples" / "flights"
SIZES = (1, 10, 100, 1000)
BARS = {1: 50.0, 1000: 2.0}
"""Target in microseconds per row, by number of rows."""
PANDAS_BAR, PYTHON_BAR = 20.0, 3.0
ULPS = 16
EARTH = 12_742.0
INPUTS: dict[str, DataType] = {
    "at": UnixTimestamp, "amount": Float64, "mean": Float64, "deviation": Float64, "lat": Float64, "lon": Float64,
    "home_lat": Float64, "home_lon": Float64, "country": String, "kind": String, "merchant": Int64, "card": Int64,
}  # fmt: skip
OUTPUTS: dict[str, DataType] = {
    "hour": Int32, "weekday": Int32, "hour_sin": Float64, "hour_cos": Float64, "distance": Float64, "ratio": Float64,
    "score": Float64, "size": Int32, "abroad": Bool, "by_card": Bool, "bucket": Int64, "known": Bool,
}  # fmt: skip
Side = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that prepares the argument of each call, and the timed function."""


def moment(
    at: Any, amount: Any, mean: Any, deviation: Any, lat: Any, lon: Any, home_lat: Any, home_lon: Any, country: Any,
    kind: Any, merchant: Any, card: Any,
) -> dict[str, Any]:  # fmt: skip
    angle = F.hour(at) * (2 * math.pi / 24)
    north, south = F.radians(lat), F.radians(home_lat)
    chord = (F.sin((south - north) / 2) ** 2
             + F.cos(north) * F.cos(south) * F.sin((F.radians(home_lon) - F.radians(lon)) / 2) ** 2)  # fmt: skip
    return {
        "hour": F.hour(at),
        "weekday": F.weekday(at),
        "hour_sin": F.sin(angle),
        "hour_cos": F.cos(angle),
        "distance": EARTH * F.asin(F.sqrt(chord)),
        "ratio": F.log1p(F.coalesce(F.try_divide(amount, mean), F.lit(0.0))),
        "score": F.try_divide(amount - mean, deviation),
        "size": F.when(amount < 10, 0).when(amount < 100, 1).when(amount < 1000, 2).otherwise(3),
        "abroad": F.coalesce(country != "DE", F.lit(True)),
        "by_card": F.coalesce(kind.isin("credit", "debit"), F.lit(False)),
        "bucket": F.pmod(merchant, F.lit(1024)),
        "known": card.isNotNull(),
    }


_HOUR, _DAY = 3_600_000_000, 86_400_000_000


def in_pandas(rows: pd.DataFrame) -> pd.DataFrame:
    """Compute the expressions in pandas, as a user would write them; times are microseconds."""
    hour = rows["at"] // _HOUR % 24
    angle = hour * (2 * math.pi / 24)
    north, south = np.radians(rows["lat"]), np.radians(rows["home_lat"])
    east, west = np.radians(rows["home_lon"]), np.radians(rows["lon"])
    chord = (np.sin((south - north) / 2) ** 2
             + np.cos(north) * np.cos(south) * np.sin((east - west) / 2) ** 2)  # fmt: skip
    amount, mean, deviation = rows["amount"], rows["mean"], rows["deviation"]
    found = pd.DataFrame()
    found["hour"], found["weekday"] = hour.astype("int32"), ((rows["at"] // _DAY + 3) % 7).astype("int32")
    found["hour_sin"], found["hour_cos"] = np.sin(angle), np.cos(angle)
    found["distance"] = EARTH * np.arcsin(np.sqrt(chord))
    found["ratio"] = np.log1p((amount / mean.where(mean != 0)).fillna(0.0))
    found["score"] = (amount - mean) / deviation.where(deviation != 0)
    found["size"] = np.select([amount < 10, amount < 100, amount < 1000], [0, 1, 2], 3).astype("int32")
    found["abroad"] = rows["country"] != "DE"
    found["by_card"] = rows["kind"].isin(["credit", "debit"])
    found["bucket"] = rows["merchant"] % 1024
    found["known"] = rows["card"].notna()
    return found


def in_python(columns: dict[str, Any]) -> dict[str, Any]:
    """Compute the expressions in plain Python, row by row, as a user would write them; times are microseconds."""
    found = [_row(*values) for values in zip(*(columns[name] for name in INPUTS), strict=True)]
    return {name: list(values) for name, values in zip(OUTPUTS, zip(*found, strict=True), strict=True)}


def _row(
    at: int, amount: float | None, mean: float | None, deviation: float | None, lat: float, lon: float, home_lat: float,
    home_lon: float, country: str | None, kind: str | None, merchant: int, card: int | None,
) -> tuple[Any, ...]:  # fmt: skip
    hour = at // _HOUR % 24
    angle = hour * (2 * math.pi / 24)
    north, south = math.radians(lat), math.radians(home_lat)
    east, west = math.radians(home_lon), math.radians(lon)
    chord = (math.sin((south - north) / 2) ** 2
             + math.cos(north) * math.cos(south) * math.sin((east - west) / 2) ** 2)  # fmt: skip
    both = amount is not None and mean is not None
    return (
        hour,
        (at // _DAY + 3) % 7,
        math.sin(angle),
        math.cos(angle),
        EARTH * math.asin(math.sqrt(chord)),
        math.log1p(amount / mean if both and mean != 0 else 0.0),  # type: ignore[operator]
        (amount - mean) / deviation if both and deviation else None,  # type: ignore[operator]
        3 if amount is None else 0 if amount < 10 else 1 if amount < 100 else 2 if amount < 1000 else 3,
        country != "DE",
        kind in ("credit", "debit"),
        merchant % 1024,
        card is not None,
    )


def main() -> int:
    parser = options_parser(__doc__, "two short rounds")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rounds, seconds = (2, 0.05) if options.quick else (options.rounds, 0.25)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    graph, views = ours(), {mode: feast_view(mode) for mode in ("pandas", "python")}
    comparisons: list[Comparison] = []
    for size in SIZES:
        columns = random_rows(size)
        table = pa.table({name: pa.array(column.tolist(INPUTS[name])) for name, column in columns.items()},
                         schema=pa.schema([(name, _ARROW[dtype.name]) for name, dtype in INPUTS.items()]))  # fmt: skip
        lists = table.to_pydict()
        answer = response(lists)
        sides: dict[str, Side] = {
            "Isthmus": (lambda columns=columns: columns, graph.run),  # type: ignore[misc]
            "pandas": (lambda answer=answer: copied(answer), partial(augmented, views["pandas"])),  # type: ignore[misc]
            "python": (lambda answer=answer: copied(answer), partial(augmented, views["python"])),  # type: ignore[misc]
            "pandas alone": (lambda table=table: table, views["pandas"].transform_arrow),  # type: ignore[misc]
            "python alone": (lambda lists=lists: lists, views["python"].transform_dict),  # type: ignore[misc]
        }
        require_same(columns, graph, views, table, lists)
        times = timed(sides, rounds, seconds)
        each = {name: round(1e6 * taken / size, 3) for name, taken in times.items()}
        note(f"{size} rows: {each}")
        rows = f"a dozen features, {size} row{'s' if size > 1 else ''}"
        if size in BARS:
            comparisons.append(at_most(rows, "µs per row", each["Isthmus"], BARS[size]))
        for mode, bar in (("pandas", PANDAS_BAR), ("python", PYTHON_BAR)):
            comparisons.append(less(rows, "µs per row", each["Isthmus"], each[mode], f"Feast, {mode} mode", bar))
            alone = f"{mode} alone"
            comparisons.append(
                less(rows, "µs per row", each["Isthmus"], each[alone], f"Feast, {mode} mode, its function alone")
            )
    comparisons += example(rounds, seconds)
    return report("request", comparisons, as_json=options.json, quick=options.quick)


def example(rounds: int, seconds: float) -> list[Comparison]:
    """Measure the request transform of the flights example, a typical one, besides the dozen expressions."""
    transform = Project(FLIGHTS).definitions.contract.transforms["moment"]
    graph, comparisons = RowGraph(transform), []
    for size, bar in BARS.items():
        chance = np.random.default_rng(size)
        columns = {name: Values(chance.random(size, np.float32), np.ones(size, bool)) for name in transform.inputs}
        columns |= {
            column.name: Values(chance.integers(1, 1440, size), np.ones(size, bool)) for column in transform.request
        }
        times = timed({"Isthmus": (lambda columns=columns: columns, graph.run)}, rounds, seconds)  # type: ignore[misc]
        each = round(1e6 * times["Isthmus"] / size, 3)
        note(f"{len(transform.fields)} features of the flights, {size} rows: {each}")
        rows = f"the flights' {len(transform.fields)} features, {size} row{'s' if size > 1 else ''}"
        comparisons.append(at_most(rows, "µs per row", each, bar))
    return comparisons


def ours() -> RowGraph:
    taken = [request_column(name, dtype) for name, dtype in INPUTS.items()]
    source = RequestSource("payment", [Field(name, dtype) for name, dtype in INPUTS.items()])
    transform = RequestTransform("moment", [source], [Field(name, dtype) for name, dtype in OUTPUTS.items()], moment)
    graph, problems = compiled(transform, taken)
    if problems:
        raise SystemExit("\n".join(map(str, problems)))
    fields = tuple(Column(name, dtype, "request") for name, dtype in OUTPUTS.items())
    return RowGraph(TransformContract("moment", (), tuple(taken), fields, graph))


def feast_view(mode: str) -> OnDemandFeatureView:
    """Return the same expressions as an on-demand feature view of Feast."""
    source = FeastRequest(name="payment", schema=_feast_fields(INPUTS))
    transformation = (
        PandasTransformation(in_pandas, "")
        if mode == "pandas"
        else PythonTransformation(cast("FunctionType", in_python), "")
    )
    return OnDemandFeatureView(name="moment", sources=[source], schema=_feast_fields(OUTPUTS), mode=mode,
                               feature_transformation=transformation)  # fmt: skip


def response(lists: Mapping[str, Sequence[Any]]) -> GetOnlineFeaturesResponse:
    answer = GetOnlineFeaturesResponse()
    for name, values in lists.items():
        answer.metadata.feature_names.val.append(name)
        kind = _value_type(INPUTS[name])
        vector = answer.results.add()
        vector.values.extend(python_values_to_proto_values([*values], kind))
        vector.statuses.extend([FieldStatus.PRESENT] * len(values))
        for _ in values:
            vector.event_timestamps.add()
    return answer


def copied(answer: GetOnlineFeaturesResponse) -> GetOnlineFeaturesResponse:
    """Copy a response, because Feast's function modifies it."""
    found = GetOnlineFeaturesResponse()
    found.CopyFrom(answer)
    return found


def augmented(view: OnDemandFeatureView, answer: GetOnlineFeaturesResponse) -> None:
    """Compute on-demand feature views as Feast's server does."""
    _augment_response_with_on_demand_transforms(
        answer,
        [f"moment:{name}" for name in OUTPUTS],
        [view],
        False,
        {name: _value_type(INPUTS[name]) for name in INPUTS},
    )


def _value_type(dtype: DataType) -> ValueType:
    found: ValueType = _feast_fields({"x": dtype})[0].dtype.to_value_type()
    return found


def _feast_fields(kinds: Mapping[str, DataType]) -> list[FeastField]:
    # Use Int64 for times: Feast would convert microseconds to datetimes, which takes longer.
    return [FeastField(name=name, dtype=getattr(feast_types, "Int64" if dtype == UnixTimestamp else dtype.name))
            for name, dtype in kinds.items()]  # fmt: skip


_ARROW = {"UnixTimestamp": pa.int64(), "Int64": pa.int64(), "Float64": pa.float64(), "String": pa.string()}


def random_rows(size: int) -> dict[str, Values]:
    """Return random rows; with several rows, 5 % of the nullable values are null."""
    chance = np.random.default_rng(size)
    data: dict[str, Any] = {
        "at": chance.integers(1_600_000_000_000_000, 1_700_000_000_000_000, size),
        "amount": chance.exponential(200, size), "mean": chance.exponential(200, size),
        "deviation": chance.exponential(50, size), "lat": chance.uniform(45, 55, size),
        "lon": chance.uniform(5, 15, size), "home_lat": chance.uniform(45, 55, size),
        "home_lon": chance.uniform(5, 15, size),
        "country": np.array(["DE", "FR", "US"], object)[chance.integers(0, 3, size)],
        "kind": np.array(["credit", "debit", "cash"], object)[chance.integers(0, 3, size)],
        "merchant": chance.integers(0, 1 << 53, size), "card": chance.integers(0, 1 << 53, size),
    }  # fmt: skip
    columns = {}
    for name, values in data.items():
        nullable = size > 1 and name in ("amount", "mean", "deviation", "country", "kind", "card")
        valid = chance.random(size) > 0.05 if nullable else np.ones(size, bool)
        values[~valid] = None if values.dtype == object else 0
        columns[name] = Values(values, valid)
    return columns


def require_same(
    columns: dict[str, Values], graph: RowGraph, views: Mapping[str, OnDemandFeatureView], table: pa.Table,
    lists: dict[str, Any],
) -> None:  # fmt: skip
    computed = graph.run(columns)
    mine = {name: values.tolist(OUTPUTS[name]) for name, values in computed.values.items()}
    theirs = {
        "pandas": views["pandas"].transform_arrow(table).to_pydict(),
        "python": views["python"].transform_dict(lists),
    }
    if computed.refused:
        raise SystemExit(f"refused: {list(computed.refused)}")
    for mode, given in theirs.items():
        for name in OUTPUTS:
            for row, (one, other) in enumerate(zip(mine[name], given[name], strict=True)):
                nothing = other is None or other != other
                if (one is None) != nothing or (one is not None and abs(one - other) > ULPS * _ulp(one)):
                    raise SystemExit(f"{name}, row {row}: {one!r}, but {other!r} in Feast's {mode} mode")


def _ulp(value: float) -> float:
    return math.ulp(value) if isinstance(value, float) else 0.0


def timed(sides: Mapping[str, Side], rounds: int, seconds: float) -> dict[str, float]:
    """Return the seconds of a call of each side in its quietest round."""
    best = dict.fromkeys(sides, math.inf)
    for _ in range(rounds):
        for name, (make, work) in sides.items():
            calls, total = 0, 0.0
            while total < seconds:
                given = make()
                began = time.perf_counter()
                work(given)
                total += time.perf_counter() - began
                calls += 1
            best[name] = min(best[name], total / calls)
    return best


if __name__ == "__main__":
    sys.exit(main())
