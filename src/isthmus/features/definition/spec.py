"""Declarations of features, with Feast's names. Importing this module loads no third-party library.

A declaration does not check itself: `compile.compile_contract` checks all of them together, so that every problem is
reported at once.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any, Literal

from isthmus.features.clock import MICROSECOND
from isthmus.features.definition.expectations import Between, Expectation, Length, OneOf, Present
from isthmus.features.files import is_url
from isthmus.features.types import DataType, UnixTimestamp

OWNER = 'an email address or "team:NAME"'
_OWNER = re.compile(r"[\w.+-]+@[A-Za-z0-9-]+\.[A-Za-z0-9.-]+|team:.+", re.ASCII)

Available = Literal["server", "device"]
"""Where a stored value exists: only behind the API, or also on the device that runs the student.

A request field exists in both places: the contract calls it "request".
"""


def is_owner(owner: str) -> bool:
    """Whether Dagster takes it for the owner of an asset; empty for none."""
    return not owner or (isinstance(owner, str) and _OWNER.fullmatch(owner) is not None)


@dataclass(frozen=True)
class Field:
    """One named, typed value.

    Attributes:
        name: unique within its view or request source.
        dtype: a type of `isthmus.features.types`.
        available: "device" if a device can have the value when it predicts (a table small enough to sync, a sensor);
            "server" if only the API can.
        description: for people; not part of the contract.
        tolerance: for a number that a request transform computes, the absolute difference between engine and graph
            that a verdict allows. A gate, not a value: not part of the contract.
        size: the number of elements of every array, checked wherever values come in; None for any number. The arrays
            that a request transform takes must have a size.
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
        join_keys: column name to type, in the order of the key.
        description: for people; not part of the contract.
    """

    name: str
    join_keys: Mapping[str, DataType]
    description: str = ""


@dataclass(frozen=True)
class Source:
    """Raw data that transforms read. It is a file, a Delta table, an Iceberg table or a query: one of these.

    Tables and queries are read once for each build, as they are when it begins, and only as far as it needs them.

    Attributes:
        name: the parameter name under which a transform receives it.
        path: a Parquet file or folder, a CSV file (also inside a `.zip`), or an object-storage URL the engine can
            read. Relative to the project; `package:NAME/FILE` is a file inside an installed Python package.
        timestamp: column that says when a row became true; must carry a time zone.
        known: column that says when a row could first be used; must carry a time zone.
        null_values: cells of a CSV file that are null, quoted or not.
        types: column to type, for a CSV file: its other columns are String, but `timestamp` and `known`
            UnixTimestamp. Not part of the contract: views are built again when they change.
        delta: the folder, relative to the project, or the URL of a Delta table.
        iceberg: an Iceberg table as `CATALOG.NAMESPACE.TABLE`; the catalog is one that pyiceberg is configured for.
        sql: a query, for PostgreSQL or DuckDB.
        connection: of a query, the name of the environment variable that holds the address of the database:
            `postgresql://USER:PASSWORD@HOST/DATABASE`, or `duckdb:FILE`.
        version_sql: of a query, another one whose answer changes whenever its rows do. Without it nothing identifies
            the rows of PostgreSQL, and its views are computed by every build.
    """

    name: str
    path: str = ""
    timestamp: str | None = None
    known: str | None = None
    null_values: Sequence[str] = ("",)
    types: Mapping[str, DataType] = field(default_factory=dict, kw_only=True)
    delta: str = field(default="", kw_only=True)
    iceberg: str = field(default="", kw_only=True)
    sql: str = field(default="", kw_only=True)
    connection: str = field(default="", kw_only=True)
    version_sql: str = field(default="", kw_only=True)

    @property
    def place(self) -> str:
        """Where it is, for people; without a secret."""
        return self.path or self.delta or self.iceberg or f"a query of {self.connection}"

    @property
    def csv(self) -> bool:
        """Return whether the source is a CSV file."""
        suffixes = [suffix.lower() for suffix in PurePosixPath(self.path).suffixes]
        compressed = suffixes[-2:] in ([".csv", ".bz2"], [".csv", ".zst"])
        return "://" not in self.path and (compressed or suffixes[-1:] in ([".csv"], [".zip"], [".gz"]))

    @property
    def column_types(self) -> Mapping[str, DataType]:
        """Return the declared types of a CSV file's columns, including its time columns."""
        times = [column for column in (self.timestamp, self.known) if column is not None]
        return {**dict.fromkeys(times, UnixTimestamp), **self.types}

    @property
    def local(self) -> bool:
        """Whether it lies in a file or folder whose content shows without a connection."""
        address = self.path or self.delta
        return bool(address) and not is_url(address)


@dataclass(frozen=True)
class FeatureView:
    """A group of features that a single transform computes for a set of entities.

    Attributes:
        name: unique within the project.
        entities: their join keys, in order, identify a row.
        schema: the features.
        sources: the parameters of the transform.
        ttl: how old a value may be and still be served; None for no limit, which has to be written.
        delay: how long after its event time a row becomes known, unless the transform returns `known_at`.
        function: the PySpark transform; its parameters are a DataFrame per source, named like the source.
        description: for people; not part of the contract.
        expectations: what must hold for a build to be written; not part of the contract.
        lookback: how far before and after a row's event time the transform reads its sources; None for all of them.
            With a lookback, the build of a range of days reads only that part of each source with a `timestamp`.
        lateness: how late rows may still arrive at the sources; `isthmus build --catch-up` goes back that far. Not
            part of the contract.
        version: a higher version starts a new table, which a feature needs to change its type.
        owner: who answers for it, an email address or "team:NAME"; not part of the contract.
    """

    name: str
    entities: Sequence[Entity]
    schema: Sequence[Field]
    sources: Sequence[Source]
    ttl: timedelta | None
    delay: timedelta = timedelta(0)
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""
    expectations: Sequence[Expectation] = ()
    lookback: timedelta | None = None
    lateness: timedelta = timedelta(0)
    version: int = 1
    owner: str = ""

    def __getitem__(self, features: Sequence[str]) -> "FeatureProjection":
        """Only these features of the view, for a feature service; a string is a single feature."""
        return _projection(self, features)


@dataclass(frozen=True)
class RequestSource:
    """Values that exist only in the request. A field named like a join key is that key's value.

    With expectations or defaults it works like a request transform whose fields are its own, `source__field` in a
    training set; request transforms then get the checked values.

    Attributes:
        name: unique within the project.
        schema: the fields.
        description: for people; not part of the contract.
        expectations: `present`, `between`, `one_of` and `length` of `Expect`. A row that breaks a rule is refused,
            unless the field has a default.
        defaults: field to the value that replaces a null or a value that breaks a rule. Such a field is optional.
    """

    name: str
    schema: Sequence[Field]
    description: str = ""
    expectations: Sequence[Present | Between | OneOf | Length] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checked(self) -> bool:
        """Whether it has expectations or defaults."""
        return bool(self.expectations or self.defaults)


@dataclass(frozen=True)
class RequestTransform:
    """Features computed at the time of the request from a row's stored features and request fields.

    The engine computes them for training; behind the API and on a device a graph does, compiled from the same function.

    Attributes:
        name: unique among views and request transforms.
        inputs: the views and request sources whose columns the function may take.
        schema: the computed fields. They exist wherever all parameters of the function do.
        function: a PySpark function from Columns to a dict of Columns by field; its parameters are named like the
            columns of a training set: `view__feature`, and request fields by their own name.
        description: for people; not part of the contract.
    """

    name: str
    inputs: Sequence["FeatureView | FeatureProjection | RequestSource"]
    schema: Sequence[Field]
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""

    def __getitem__(self, features: Sequence[str]) -> "FeatureProjection":
        """Only these fields, for a feature service; a string is a single field."""
        return _projection(self, features)


AtRequest = RequestTransform | RequestSource
"""What is computed at the time of the request; among request sources, those that are checked."""


@dataclass(frozen=True)
class FeatureProjection:
    """A selection of the features of a view or a request transform."""

    view: FeatureView | RequestTransform
    features: tuple[str, ...]


def _projection(view: FeatureView | RequestTransform, features: Sequence[str]) -> FeatureProjection:
    names = listed(features)
    return FeatureProjection(view, names if isinstance(names, tuple) else (features,))


def listed(values: Any) -> Any:
    """Return a tuple of the values. Return anything but a list unchanged, so that a check can name it."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else values


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The stored features that devices keep: the rows of a service's views at a moment, as a signed file.

    Attributes:
        age: the greatest age at which a device may use a snapshot.
        every: how often a new one is made: the moments of snapshots are multiples of it since 1970 UTC, where training
            data are joined as a device sees them.
        keys: a join key to the values that devices keep; a view with another join key is kept whole.
        keep: of how many earlier snapshots the differences to the newest are kept.
        owner: a join key that each device has one value of, such as the customer who uses it: of the views with that
            key, it keeps the rows of this value alone. None where every device keeps the same.
    """

    age: timedelta
    every: timedelta
    keys: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    keep: int = 6
    owner: str | None = None

    def identity(self) -> list[Any]:
        """Plain data, of which it depends what a device sees.

        The owner is left out: each row of a training set is asked by the device of its own key, which has its rows.
        """
        keys = {key: sorted(map(str, values)) for key, values in sorted(self.keys.items())}
        return [self.age / MICROSECOND, self.every / MICROSECOND, *([keys] if keys else [])]


@dataclass(frozen=True)
class FeatureService:
    """The features of a model: views, request sources and request transforms, or parts of them.

    The model's inputs are the stored features, then the request fields, then the computed ones, each in this order.

    Attributes:
        device: what devices keep of the views; None if no device keeps rows. How a snapshot is made is not part of the
            contract.
    """

    name: str
    features: Sequence[FeatureView | FeatureProjection | RequestSource | RequestTransform]
    description: str = ""
    device: Snapshot | None = None


@dataclass(frozen=True)
class Spine:
    """The examples a model learns from: a row for each moment of a prediction, with the label.

    Its function returns the join keys of all `entities`, `event_timestamp` (the moment of the prediction), `known_at`
    (when the label became known), the fields of `request`, and the label.

    Attributes:
        name: unique within the project.
        entities: their join keys are columns of the rows.
        label: what the model predicts; Int64 with values 0 and 1 for a binary label. A `Tabular` says what else.
        sources: the parameters of the function.
        request: the request source whose fields are columns of the rows.
        function: a PySpark function; its parameters are a DataFrame per source, named like the source.
        description: for people; not part of the contract.
    """

    name: str
    entities: Sequence[Entity]
    label: Field
    sources: Sequence[Source]
    request: RequestSource | None = None
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""
