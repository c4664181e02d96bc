"""Declarations: what a feature is, by Feast's names.

Every class is frozen and light; importing this module loads no third-party library. A declaration does not check
itself: `declarations.compile_contract` looks at all of them together, so that every problem is reported at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from isthmus.features.definition.expectations import Expectation
from isthmus.features.types import DataType

Available = Literal["server", "device"]
"""Where a stored value can exist: only behind the API, or also on the device that runs the student.

A request field exists wherever the request is, which is both: to the contract it is "request".
"""


@dataclass(frozen=True)
class Field:
    """One named, typed value.

    Attributes:
        name: unique within its view or request source.
        dtype: one of the types of `isthmus.features.types`.
        available: "device" if a device can have the value when it predicts (a table small enough to sync, a sensor);
            "server" if only the API can.
        description: for people; not part of the contract.
        tolerance: of a number that a request transform computes, the absolute difference between engine and graph that
            a verdict lets pass. A gate, not a value: not part of the contract.
        size: of an array, how many elements each one has, checked wherever values come in; None for any number. What a
            request transform takes must have one.
    """

    name: str
    dtype: DataType
    available: Available = "server"
    description: str = ""
    tolerance: float = 0.0
    size: int | None = None


@dataclass(frozen=True)
class Entity:
    """What a feature describes: a carrier, an airport, an aircraft.

    Attributes:
        name: unique within the project.
        join_keys: column name to type, in the order in which they make up the key.
        description: for people; not part of the contract.
    """

    name: str
    join_keys: Mapping[str, DataType]
    description: str = ""


@dataclass(frozen=True)
class Source:
    """Raw data that transforms read.

    Attributes:
        name: the parameter name under which a transform receives it.
        path: a Parquet file or folder, a CSV file (also inside a `.zip`), or an object-storage URL the engine can
            read. Relative to the project; `package:NAME/FILE` is a file inside an installed Python package.
        timestamp: column that says when a row became true; must carry a time zone.
        known: column that says when a row could first be used; must carry a time zone.
        null_values: texts that mean null in a CSV file.
    """

    name: str
    path: str
    timestamp: str | None = None
    known: str | None = None
    null_values: Sequence[str] = ("",)


@dataclass(frozen=True)
class FeatureView:
    """A group of features that one transform computes for one set of entities.

    Attributes:
        name: unique within the project.
        entities: whose join keys together identify a row, in order.
        schema: the features.
        sources: what the transform reads.
        ttl: how old a value may be and still be served; None for as old as you like.
        delay: how long after its event time a row becomes known, where the transform gives no `known_at` itself.
        function: the PySpark transform; one DataFrame parameter per source, named like the source.
        description: for people; not part of the contract.
        expectations: what a build must hold to be written; gates, not values, so not part of the contract either.

        lookback: how far from a row's event time its sources reach; None for everything they hold. Given one, the build
            of a range reads of each source with a `timestamp` only what lies within `lookback` of the range.
        lateness: how late rows may still arrive at the sources; `isthmus build --catch-up` goes back so far. Not part
            of the contract.
        version: a new one begins a table of its own, which a feature of another type needs.
    """

    name: str
    entities: Sequence[Entity]
    schema: Sequence[Field]
    sources: Sequence[Source]
    ttl: timedelta | None = None
    delay: timedelta = timedelta(0)
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""
    expectations: Sequence[Expectation] = ()

    lookback: timedelta | None = None
    lateness: timedelta = timedelta(0)
    version: int = 1

    def __getitem__(self, features: Sequence[str]) -> "FeatureProjection":
        """Only the named features of this view, for a feature service; a single name counts as a list of one."""
        return FeatureProjection(self, (features,) if isinstance(features, str) else tuple(features))


@dataclass(frozen=True)
class RequestSource:
    """Values that exist only in the request. A field named like a join key is that key's value.

    With expectations or defaults it is a request transform of itself: its fields are what it gives, `source__field` in
    a training set, and what a request transform takes of it is checked, too.

    Attributes:
        name: unique within the project.
        schema: the fields.
        description: for people; not part of the contract.
        expectations: what each value must keep: `present`, `between`, `one_of` and `length` of `Expect`. A row with a
            value that does not is refused, unless the field has a default.
        defaults: field to what stands where its value is null or not as expected. Such a field may be left out.
    """

    name: str
    schema: Sequence[Field]
    description: str = ""
    expectations: Sequence[Expectation] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checked(self) -> bool:
        """Whether anything is expected of a field, or stands in for one."""
        return bool(self.expectations or self.defaults)


@dataclass(frozen=True)
class RequestTransform:
    """Features of one row, computed at the moment of the question from stored features and request fields.

    The engine computes them for training; behind the API and on a device a graph does, compiled from the same function.

    Attributes:
        name: unique among views and request transforms.
        inputs: what the function may take.
        schema: what it gives. Where a value can exist is where all that the function takes can.
        function: PySpark, of Columns to a dict of Columns by field; its parameters are named like the columns of a
            training set: `view__feature`, and request fields by their own name.
        description: for people; not part of the contract.
    """

    name: str
    inputs: Sequence["FeatureView | FeatureProjection | RequestSource"]
    schema: Sequence[Field]
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""

    def __getitem__(self, features: Sequence[str]) -> "FeatureProjection":
        """Only the named fields, for a feature service; a single name counts as a list of one."""
        return FeatureProjection(self, (features,) if isinstance(features, str) else tuple(features))


AtRequest = RequestTransform | RequestSource
"""What is computed at the request; of request sources those that are checked."""


@dataclass(frozen=True)
class FeatureProjection:
    """Some features of a view or of a request transform."""

    view: FeatureView | RequestTransform
    features: tuple[str, ...]


@dataclass(frozen=True)
class FeatureService:
    """The features of one model: views, request fields and request transforms, or parts of them.

    The model's inputs are the stored features, then the request fields, then what is computed, each in this order.
    """

    name: str
    features: Sequence[FeatureView | FeatureProjection | RequestSource | RequestTransform]
    description: str = ""


@dataclass(frozen=True)
class Spine:
    """The moments at which a model is asked, with the answer: one row per example.

    Its function returns the join keys of all `entities`, `event_timestamp` (the moment of the question), `known_at`
    (when the label became known), the fields of `request`, and the label.

    Attributes:
        name: unique within the project.
        entities: whose keys the rows carry.
        label: the answer; Int64 with values 0 and 1 for a binary question.
        sources: what the function reads.
        request: the request fields the rows carry.
        function: PySpark; one DataFrame parameter per source, named like the source.
        description: for people; not part of the contract.
    """

    name: str
    entities: Sequence[Entity]
    label: Field
    sources: Sequence[Source]
    request: RequestSource | None = None
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""
