"""Decorators that declare PySpark functions, without calling them. Invalid arguments raise a ConfigurationError."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from isthmus.features.definition.expectations import Expectation
from isthmus.features.definition.failure import explain_arguments
from isthmus.features.definition.spec import (
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
    """Declare the decorated PySpark function as a feature view with the function's name.

    The function takes one DataFrame per source, named like the source. It returns a DataFrame with the join keys,
    `event_timestamp` and the features. It also returns `known_at`, unless each row is known `delay` after its event
    time. Columns of the result that a source names with `timestamp=` or `known=` become `event_timestamp` or
    `known_at`. If rows break an expectation, a build writes nothing. The first line of the function's docstring becomes
    the description. `ttl` is the maximum age of a served value (None: no limit). `lookback` is the time around a row's
    event that the function reads (None: all). `lateness` is the longest delay of source rows. A higher `version` starts
    a new table.
    """
    return lambda function: FeatureView(
        _name(function), as_tuple(entities), as_tuple(schema), as_tuple(sources), ttl, delay, function,
        _about(function), as_tuple(expectations), lookback, lateness, version, owner,
    )  # fmt: skip


@explain_arguments
def spine(
    *, entities: Sequence[Entity], sources: Sequence[Source], label: Field, request: RequestSource | None = None
) -> Callable[[Function], Spine]:
    """Declare the decorated PySpark function as a spine: the training examples, one row per prediction to learn.

    The spine has the function's name. The function takes one DataFrame per source, named like the source. It returns a
    DataFrame with the join keys, `event_timestamp` (the time of the prediction), `known_at` (the time the label became
    known), the fields of `request` and the label. Columns that a source names with `timestamp=` or `known=` become
    these two time columns.
    """
    return lambda function: Spine(
        _name(function), as_tuple(entities), label, as_tuple(sources), request, function, _about(function)
    )


@explain_arguments
def request_transform(
    *, inputs: Sequence[FeatureView | FeatureProjection | RequestSource], schema: Sequence[Field]
) -> Callable[[Function], RequestTransform]:
    """Declare the decorated PySpark function as a request transform: it computes features for each request.

    The transform has the function's name. Each parameter of the function receives a Column. Its name is
    `view__feature`, or the name of a request field. The function returns a dict with a Column of the declared type for
    each field of the schema. It may use only the PySpark functions in docs/row-functions.md; `isthmus apply` rejects
    any other function.
    """
    return lambda function: RequestTransform(
        _name(function), as_tuple(inputs), as_tuple(schema), function, _about(function)
    )


def _name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _about(function: Function) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
