"""Declarations of features, with Feast's names and no third-party imports. `compile_contract` checks them together."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any, Literal

from isthmus.features.clock import MICROSECOND
from isthmus.features.definition.expectations import Between, Expectation, Length, OneOf, Present
from isthmus.features.definition.streams import Stream
from isthmus.features.definition.tiles import Tiling
from isthmus.features.files import is_url
from isthmus.features.types import DataType, UnixTimestamp

OWNER = 'an email address or "team:NAME"'
_OWNER = re.compile(r"[\w.+-]+@[A-Za-z0-9-]+\.[A-Za-z0-9.-]+|team:.+", re.ASCII)

Available = Literal["server", "device"]
"""Places where a stored value is available: only behind the API, or also on the device that runs the student.

Request fields are available in both places; the contract calls them "request".
"""


def is_owner(owner: str) -> bool:
    return not owner or (isinstance(owner, str) and _OWNER.fullmatch(owner) is not None)


@dataclass(frozen=True)
class Field:
    """A named, typed value.

    Attributes:
        name: unique name within its view or request source.
        dtype: type from `isthmus.features.types`.
        available: "device" if a device can have the value when it predicts (from a small synced table or a sensor);
            "server" if only the API has it.
        tolerance: allowed absolute difference between engine and graph, for a number that a request transform computes.
            Only verification reads it; not part of the contract.
        size: number of elements in every array, checked on input; None allows any number. Arrays that a request
            transform reads must have a size.
    """

    name: str
    dtype: DataType
    available: Available = "server"
    description: str = ""  # not part of the contract
    tolerance: float = 0.0
    size: int | None = None


@dataclass(frozen=True)
class Entity:
    """The thing a feature describes: a carrier, an airport, an aircraft.

    Attributes:
        name: unique name within the project.
        join_keys: column name to type, in the order of the key.
    """

    name: str
    join_keys: Mapping[str, DataType]
    description: str = ""  # not part of the contract


@dataclass(frozen=True)
class Source:
    """Raw data that transforms read: exactly one of a file, a Delta table, an Iceberg table or a query.

    Each build reads a table or query once, at one version, and only the rows it needs.

    Attributes:
        name: name of the transform parameter that receives the data.
        path: Parquet file or folder, CSV file (also inside a `.zip`), or an object-storage URL the engine can read.
            Relative to the project; `package:NAME/FILE` is a file inside an installed Python package.
        timestamp: column with the time a row became true; needs a time zone.
        known: column with the time a row could first be used; needs a time zone.
        null_values: CSV cells that are read as null, quoted or not.
        types: column to type, for a CSV file. `timestamp` and `known` default to UnixTimestamp and all other columns to
            String. Not part of the contract, but views are rebuilt when the types change.
        delta: folder (relative to the project) or URL of a Delta table.
        iceberg: Iceberg table as `CATALOG.NAMESPACE.TABLE`; the catalog must be configured for pyiceberg.
        sql: query for PostgreSQL or DuckDB.
        connection: environment variable with the database address for `sql`:
            `postgresql://USER:PASSWORD@HOST/DATABASE`, or `duckdb:FILE`.
        version_sql: query whose result changes whenever the rows of `sql` change. Without it, views that read
            PostgreSQL are recomputed by every build.
        stream: stream on which new rows arrive as events, for `isthmus stream`. The data named above then hold the
            earlier rows, and determine the columns. Rows that are equal in all columns are one event. Not part of the
            contract.
        lateness: time that `isthmus stream` waits for events that arrive out of order, by their known times. Later
            events correct rows that were published before.
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
    stream: Stream | None = field(default=None, kw_only=True)
    lateness: timedelta = field(default=timedelta(0), kw_only=True)

    @property
    def place(self) -> str:
        """The location of the data, for messages: a path, a URL, a table, or "a query of <connection>"."""
        return self.path or self.delta or self.iceberg or f"a query of {self.connection}"

    @property
    def known_column(self) -> str:
        """Column with the time a row could first be used: `known`, or `timestamp` without it; empty without both."""
        return self.known or self.timestamp or ""

    @property
    def csv(self) -> bool:
        suffixes = [suffix.lower() for suffix in PurePosixPath(self.path).suffixes]
        compressed = suffixes[-2:] in ([".csv", ".bz2"], [".csv", ".zst"])
        return "://" not in self.path and (compressed or suffixes[-1:] in ([".csv"], [".zip"], [".gz"]))

    @property
    def column_types(self) -> Mapping[str, DataType]:
        """Column types for reading a CSV file: `types`, and UnixTimestamp for time columns that are not in `types`.

        All columns that are missing here are read as String.
        """
        times = [column for column in (self.timestamp, self.known) if column is not None]
        return {**dict.fromkeys(times, UnixTimestamp), **self.types}

    @property
    def local(self) -> bool:
        """True if the data are a local file or folder, False for a URL, an Iceberg table or a query."""
        address = self.path or self.delta
        return bool(address) and not is_url(address)


@dataclass(frozen=True)
class FeatureView:
    """A group of features that one transform computes for a set of entities.

    Attributes:
        name: unique name within the project.
        entities: entities whose join keys, in order, identify a row.
        ttl: maximum age of a value that is served; None, which must be written out, for no limit.
        delay: time from a row's event until it becomes known, unless the transform returns `known_at`.
        function: PySpark transform with one DataFrame parameter per source, named like the source.
        expectations: rules for the rows. A build whose rows break one writes nothing. Not part of the contract.
        lookback: time before and after a row's event that the transform reads from its sources; None reads all of them.
            With a lookback, a build of a few days reads only that part of each source with a `timestamp`.
        lateness: longest delay with which rows arrive at the sources. `isthmus build --catch-up` builds again from that
            long before the end of the table. Not part of the contract.
        version: table version. Raise it to start a new table, for example to change a feature's type.
        owner: email address or "team:NAME"; not part of the contract.
        tiling: aggregations over sliding windows of the events that `function` returns; None if it returns the rows.
    """

    name: str
    entities: Sequence[Entity]
    schema: Sequence[Field]
    sources: Sequence[Source]
    ttl: timedelta | None
    delay: timedelta = timedelta(0)
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""  # not part of the contract
    expectations: Sequence[Expectation] = ()
    lookback: timedelta | None = None
    lateness: timedelta = timedelta(0)
    version: int = 1
    owner: str = ""
    tiling: Tiling | None = None

    @property
    def streams(self) -> list[Source]:
        """The sources that have a stream: `isthmus stream` keeps the view up to date with it."""
        return [source for source in self.sources if source.stream is not None]

    def __getitem__(self, features: Sequence[str]) -> "FeatureProjection":
        """Select some features of the view for a feature service; a string selects one feature."""
        return _projection(self, features)


@dataclass(frozen=True)
class RequestSource:
    """Values that exist only in the request. A field named like a join key is that key's value.

    With expectations or defaults, the source works like a request transform that computes its own fields: they are
    `source__field` in a training set, and request transforms get the checked values.

    Attributes:
        name: unique name within the project.
        expectations: `present`, `between`, `one_of` and `length` of `Expect`. A row that breaks a rule is rejected,
            unless the field has a default.
        defaults: field to the value that replaces a null or a value that breaks a rule. Such a field is optional.
    """

    name: str
    schema: Sequence[Field]
    description: str = ""  # not part of the contract
    expectations: Sequence[Present | Between | OneOf | Length] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checked(self) -> bool:
        return bool(self.expectations or self.defaults)


@dataclass(frozen=True)
class RequestTransform:
    """Features computed at request time from a row's stored features and request fields.

    The engine computes them for training. The API and devices run an ONNX graph compiled from the same function.

    Attributes:
        name: unique name among views and request transforms.
        inputs: views and request sources whose columns the function may read.
        schema: computed fields. They are available wherever all parameters of the function are.
        function: PySpark function from Columns to a dict of field name to Column. Its parameters are named like the
            columns of a training set: `view__feature`, and request fields by their own name.
    """

    name: str
    inputs: Sequence["FeatureView | FeatureProjection | RequestSource"]
    schema: Sequence[Field]
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""  # not part of the contract

    def __getitem__(self, features: Sequence[str]) -> "FeatureProjection":
        """Select some computed fields for a feature service; a string selects one field."""
        return _projection(self, features)


AtRequest = RequestTransform | RequestSource
"""A declaration that is computed at request time; request sources only if they are checked."""


@dataclass(frozen=True)
class FeatureProjection:
    view: FeatureView | RequestTransform
    features: tuple[str, ...]


def _projection(view: FeatureView | RequestTransform, features: Sequence[str]) -> FeatureProjection:
    names = as_tuple(features)
    return FeatureProjection(view, names if isinstance(names, tuple) else (features,))


def as_tuple(values: Any) -> Any:
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else values


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The stored features that devices keep: rows of a service's views at one moment, in a signed file.

    Attributes:
        age: maximum age of a snapshot that a device may use.
        every: time between snapshots. They are made at multiples of it since 1970 UTC, and training data are joined as
            of those times.
        keys: join key to the values that devices keep. All rows of a view are kept if none of its join keys is listed.
        keep: number of earlier snapshots with a difference file to the newest.
        owner: join key that identifies the device, such as its customer. From views with that key, each device keeps
            only its own rows. None if all devices keep the same rows.
    """

    age: timedelta
    every: timedelta
    keys: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    keep: int = 6
    owner: str | None = None

    def identity(self) -> list[Any]:
        """Return the settings that determine which rows a device sees, as plain data to hash.

        If they change, training results become outdated. The list has `age` and `every` in microseconds, then `keys` if
        any.
        """
        # Not the owner: each training row is looked up on the device of its own key, which has the rows.
        keys = {key: sorted(map(str, values)) for key, values in sorted(self.keys.items())}
        return [self.age / MICROSECOND, self.every / MICROSECOND, *([keys] if keys else [])]


@dataclass(frozen=True)
class FeatureService:
    """The features of a model: views, request sources and request transforms, or parts of them.

    The model's inputs are the stored features, then the request fields, then the computed ones, each in this order.

    Attributes:
        device: rows of the views that devices keep, or None. How a snapshot is made is not part of the contract.
    """

    name: str
    features: Sequence[FeatureView | FeatureProjection | RequestSource | RequestTransform]
    description: str = ""  # not part of the contract
    device: Snapshot | None = None


@dataclass(frozen=True)
class Spine:
    """The examples a model learns from: one row per prediction, with its label (an entity dataframe plus the label).

    The function returns the join keys of all `entities`, `event_timestamp` (the time of the prediction), `known_at`
    (when the label became known), the fields of `request`, and the label.

    Attributes:
        name: unique name within the project.
        entities: entities whose join keys are columns of the rows.
        label: value to predict; Int64 with values 0 and 1 for a binary label. See `Tabular` for the other labels.
        request: request source whose fields are columns of the rows.
        function: PySpark function with one DataFrame parameter per source, named like the source.
    """

    name: str
    entities: Sequence[Entity]
    label: Field
    sources: Sequence[Source]
    request: RequestSource | None = None
    function: Callable[..., Any] | None = field(default=None, repr=False)
    description: str = ""  # not part of the contract
