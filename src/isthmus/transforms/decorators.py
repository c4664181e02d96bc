"""The decorators that turn a PySpark function into a declaration. Importing this does not load pyspark."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from isthmus.features.definition.expectations import Expectation
from isthmus.features.definition.failure import declared
from isthmus.features.definition.spec import (
    Entity,
    FeatureProjection,
    FeatureView,
    Field,
    RequestSource,
    RequestTransform,
    Source,
    Spine,
    listed,
)

Function = Callable[..., Any]


@declared
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
    `event_timestamp`, the features, and `known_at` unless every row is known `delay` after its event time. The
    `timestamp` and `known` columns of a source count as `event_timestamp` and `known_at`, even under their original
    names. If rows break an expectation, a build writes nothing.
    """
    return lambda function: FeatureView(
        _name(function), listed(entities), listed(schema), listed(sources), ttl, delay, function, _about(function),
        listed(expectations), lookback, lateness, version, owner,
    )  # fmt: skip


@declared
def spine(
    *, entities: Sequence[Entity], sources: Sequence[Source], label: Field, request: RequestSource | None = None
) -> Callable[[Function], Spine]:
    """Declare the decorated PySpark function as a spine: the times of predictions, with the label.

    The function returns the join keys, `event_timestamp`, `known_at` (when the label became known), the request fields
    and the label.
    """
    return lambda function: Spine(
        _name(function), listed(entities), label, listed(sources), request, function, _about(function)
    )


@declared
def request_transform(
    *, inputs: Sequence[FeatureView | FeatureProjection | RequestSource], schema: Sequence[Field]
) -> Callable[[Function], RequestTransform]:
    """Declare the decorated PySpark function as a request transform with the function's name.

    The function takes Columns, named like the inputs in a training set (`view__feature`, or the name of a request
    field), and returns a dict with a Column for each field of the schema, of the field's type. It may use the functions
    in docs/row-functions.md; `isthmus apply` rejects any other function.
    """
    return lambda function: RequestTransform(
        _name(function), listed(inputs), listed(schema), function, _about(function)
    )


def _name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _about(function: Function) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
