"""Decorators that declare PySpark functions, without calling them. Invalid arguments raise a ConfigurationError."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from isthmus.features.definition.expectations import Expectation
from isthmus.features.definition.failure import explain_arguments
from isthmus.features.definition.spec import (
    Available,
    Entity,
    FeatureProjection,
    FeatureView,
    Field,
    RequestSource,
    RequestTransform,
    Source,
    Spine,
    as_tuple,
)
from isthmus.features.definition.tiles import Aggregation, Tiling, window_name
from isthmus.features.errors import ConfigurationError

Function = Callable[..., Any]


@explain_arguments
def transform(  # noqa: PLR0913 - the declaration of a view, by name
    *,
    entities: Sequence[Entity],
    sources: Sequence[Source],
    schema: Sequence[Field],
    ttl: timedelta | None,
    delay: timedelta = timedelta(0),
    expectations: Sequence[Expectation] = (),
    lookback: timedelta | None = None,
    lateness: timedelta = timedelta(0),
    version: int = 1,
    owner: str = "",
) -> Callable[[Function], FeatureView]:
    """Declare the decorated PySpark function as a feature view. The view has the function's name.

    The function takes one DataFrame per source, named like the source. It returns a DataFrame with the join keys of
    `entities`, the features of `schema`, and two columns of times: `event_timestamp`, and `known_at`, when the row
    became known. A result without `known_at` is known `delay` after its event time. If a source declares `timestamp=`
    or `known=`, the function may return that column under the source's name for it. The first line of its docstring
    describes the view.

    `ttl` is the maximum age of a served value, or None for no limit. `lookback` is how far around a row's event time
    the function reads its sources, or None for everything. `lateness` is the longest delay with which rows reach the
    sources. A build whose rows break one of the `expectations` writes nothing. Raise `version` to start a new table.
    `owner` is an email address or "team:NAME".
    """
    return lambda function: FeatureView(
        _name(function), as_tuple(entities), as_tuple(schema), as_tuple(sources), ttl, delay, function,
        _about(function), as_tuple(expectations), lookback, lateness, version, owner,
    )  # fmt: skip


@explain_arguments
def aggregate(  # noqa: PLR0913 - the declaration of a view, by name
    *,
    entities: Sequence[Entity],
    sources: Sequence[Source],
    tiles: Sequence[Aggregation],
    windows: Sequence[timedelta],
    tick: timedelta,
    ttl: timedelta | None,
    available: Available = "server",
    expectations: Sequence[Expectation] = (),
    lookback: timedelta | None = None,
    lateness: timedelta = timedelta(0),
    version: int = 1,
    owner: str = "",
) -> Callable[[Function], FeatureView]:
    """Declare a feature view of counts, sums, means, minima and maxima over sliding windows, named like the function.

    The decorated PySpark function takes one DataFrame per source, and returns the events to aggregate: the join keys of
    `entities`, the columns that `tiles` name, and the source's column for the time at which an event became known. Each
    result row must come from one row of the source: no grouping, no `distinct`, no window. Columns are integers,
    because sums of other numbers depend on their order: use cents, or milliseconds. Sums must fit into 64 bits.

    The view has a row for each key and multiple of `tick` with an event, and a feature for each of `tiles` and
    `windows`, such as `delay_sum_28d`. An event counts from the first tick at or after its `known_at`. `isthmus stream`
    keeps partial results per tick, so an event costs the same however long the windows are.

    `lookback` is by default the longest window and a tick. If events become known up to a time D after their own time,
    declare at least D more. The other arguments are those of `transform`.
    """

    def declare(function: Function) -> FeatureView:
        name, tiling = _name(function), Tiling(as_tuple(tiles), as_tuple(windows), tick)
        if problems := tiling.problems(f"view {name}, "):
            raise ConfigurationError("definitions.py", problems)
        known_later = any(
            source.known not in (None, source.timestamp)
            for source in (sources if isinstance(sources, Sequence) else ())
            if isinstance(source, Source)  # `Declarations` refuses anything else
        )
        reach = max(tiling.windows) + tick if lookback is None and not known_later else lookback
        return FeatureView(
            name, as_tuple(entities), tuple(_features(tiling, available)), as_tuple(sources), ttl, timedelta(0),
            function, _about(function), as_tuple(expectations), reach, lateness, version, owner, tiling,
        )  # fmt: skip

    return declare


@explain_arguments
def spine(
    *, entities: Sequence[Entity], sources: Sequence[Source], label: Field, request: RequestSource | None = None
) -> Callable[[Function], Spine]:
    """Declare the decorated PySpark function as a spine: the training examples, with one row per prediction.

    The spine has the function's name. The function takes one DataFrame per source, named like the source. It returns a
    DataFrame with the join keys of `entities`, the fields of `request`, the `label`, and two columns of times:
    `event_timestamp`, the time of the prediction, and `known_at`, when the label became known. If a source declares
    `timestamp=` or `known=`, the function may return that column under the source's name for it.
    """
    return lambda function: Spine(
        _name(function), as_tuple(entities), label, as_tuple(sources), request, function, _about(function)
    )


@explain_arguments
def request_transform(
    *, inputs: Sequence[FeatureView | FeatureProjection | RequestSource], schema: Sequence[Field]
) -> Callable[[Function], RequestTransform]:
    """Declare the decorated PySpark function as a request transform: features that are computed for each request.

    The transform has the function's name. Each parameter of the function is a Column. Name it `view__feature` for a
    stored feature, or like a field of a request source. Both must belong to `inputs`. The function returns a dict with
    a Column for each field of `schema`. `isthmus apply` compiles the function, and rejects PySpark functions that are
    not listed in docs/row-functions.md.
    """
    return lambda function: RequestTransform(
        _name(function), as_tuple(inputs), as_tuple(schema), function, _about(function)
    )


def _features(tiling: Tiling, available: Available) -> Iterator[Field]:
    for name, each, window in tiling.features():
        about = f"{each.suffix} of {each.column or 'events'} in {window_name(window)}"
        yield Field(name, each.dtype, available, about)


def _name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _about(function: Function) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
