"""Requests and answers of the API. The types decode requests and generate the OpenAPI document."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from isthmus.features.profiles import ServingDevice
from isthmus.features.projectstatus import ProjectStatus

FieldStatus = Literal["PRESENT", "NULL_VALUE", "NOT_FOUND", "OUTSIDE_MAX_AGE", "INVALID"]

Scalar = bool | int | float | str

_SCALARS = ["boolean", "number", "string"]
_COLUMN = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [{"type": [*_SCALARS, "null"]}, {"type": "array", "items": {"type": _SCALARS}}]},
}

Columns = dict[str, Annotated[Raw, Meta(extra_json_schema=_COLUMN)]]
"""Column name to its values, undecoded: the contract has the type of each column."""

_Cached = Annotated[bool, Meta(description="Sent by Feast's client; ignored.")]
_Transformed = Annotated[bool, Meta(description="Sent by Feast's client; ignored: rows are written unchanged.")]
_Micros = Annotated[int, Meta(description="Microseconds since 1970 UTC.")]


class LookupRequest(Struct, forbid_unknown_fields=True):
    """A lookup of features, as `view:feature`, or of a feature service, for the rows of `entities`."""

    entities: Annotated[
        Columns,
        Meta(
            description="Join keys and request fields by name, with one value per row. The answer keeps the order. "
            "The value of an array field is a list, of the declared size if one is declared.",
            examples=[{"carrier": ["UA", "AA"]}],
        ),
    ]
    features: Annotated[list[str] | None, Meta(examples=[["punctuality:flights"]])] = None
    feature_service: str | None = None
    full_feature_names: Annotated[bool, Meta(description="Name features `view__feature`, not `feature`.")] = False
    include_feature_view_version_metadata: Annotated[
        bool, Meta(description="Sent by Feast's client; the contract hash is this API's version.")
    ] = False


class Metadata(Struct):
    """The names of the result columns, and the contract in use.

    `problems` lists damaged rows and keys that another program wrote to Redis: their status is INVALID and their values
    are null.
    """

    feature_names: list[str]
    contract: str
    problems: list[str] | UnsetType = UNSET


class FeatureVector(Struct):
    """One column of an answer. Non-finite numbers are "NaN", "Infinity" and "-Infinity"; bytes are Base64.

    The value of an array feature is a list.
    """

    values: list[Scalar | list[Scalar] | None]
    statuses: list[FieldStatus]
    event_timestamps: list[Annotated[str, Meta(extra_json_schema={"format": "date-time"})]]


class LookupAnswer(Struct):
    """A column for each join key of the request, then a column for each feature."""

    metadata: Metadata
    results: list[FeatureVector]


class ValuesAnswer(Struct):
    """The compact format: the values of each column, and the statuses of each view, per row."""

    metadata: Metadata
    values: list[list[Scalar | list[Scalar] | None]]
    statuses: dict[str, list[FieldStatus]]


class PushRequest(Struct, forbid_unknown_fields=True):
    """Rows for the online store, the history of a view, or both, in Feast's format."""

    push_source_name: Annotated[str, Meta(description="View that the rows belong to.", examples=["punctuality"])]
    df: Annotated[
        Columns,
        Meta(
            description="Columns by name, one value per row: the join keys, `event_timestamp`, every feature of the "
            "view, and optionally `known_at` (default: the server's time). Times are RFC 3339 text with a zone, or "
            "whole microseconds since 1970 UTC; no time may be in the future. The value of an array feature is a list, "
            "of the declared size if one is declared.",
            examples=[{
                "carrier": ["UA"], "event_timestamp": ["2027-01-15T07:30:00Z"], "late_rate": [0.25], "flights": [None]
            }],
        ),
    ]  # fmt: skip
    allow_registry_cache: _Cached = True
    to: Annotated[
        Literal["online", "offline", "online_and_offline"],
        Meta(
            description="Destination of the rows: the online store, the history of the view (within its declared "
            "interval), or both."
        ),
    ] = "online_and_offline"
    transform_on_write: _Transformed = True


class WriteRequest(Struct, forbid_unknown_fields=True):
    """Rows for the online store, as Feast's SDK writes them with `online_store: {type: remote}`."""

    feature_view_name: Annotated[str, Meta(description="View that the rows belong to.", examples=["punctuality"])]
    df: Annotated[
        Columns,
        Meta(
            description="Columns by name, one value per row: the join keys, `event_timestamp`, every feature of the "
            "view, and optionally `created` (null or missing: the server's time). Times without a zone are UTC. "
            "UnixTimestamp features are whole seconds since 1970 UTC. No time may be in the future.",
            examples=[{
                "carrier": ["UA"], "event_timestamp": ["2027-01-15T07:30:00"], "created": [None], "late_rate": [0.25],
                "flights": [None],
            }],
        ),
    ]  # fmt: skip
    allow_registry_cache: _Cached = True
    transform_on_write: _Transformed = True


class PushAnswer(Struct):
    """The number of rows accepted, and the number written; rows older than the stored ones are not written."""

    rows: int
    written: int


class PredictRequest(Struct, forbid_unknown_fields=True):
    """A prediction for each row of join keys and request fields."""

    model: str | None = None
    entities: Annotated[Columns, Meta(description="Join key to its values, one per row.")] = {}
    request: Annotated[
        Columns,
        Meta(description="Request fields by name, with one value per row. May omit fields that are also join keys."),
    ] = {}


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """Generate text after a prompt."""

    prompt: Annotated[
        str, Meta(description="The user's text. Control tokens in it are treated as text.", examples=["Hello"])
    ]
    model: str | None = None
    entities: Annotated[
        Columns,
        Meta(description="Join key to a list of one value. Its features are inserted in the prompt."),
    ] = {}
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class EventText(Struct):
    """Event `text`: the next piece of text."""

    text: str


class EventEnd(Struct):
    """Event `end`: the reason generation stopped, and token counts."""

    reason: Annotated[
        Literal["end", "length", "time"],
        Meta(description="`end`: the model stopped; `length`: token limit or context reached; `time`: time limit."),
    ]
    prompt_tokens: int
    tokens: int


class PredictAnswer(Struct):
    """A prediction per row, and the status of each view for the row.

    A classifier returns the name of the most likely class, or null without an answer, and the probabilities of all
    `classes`, in order. If any number of classes may be right, it returns a list of those with a probability above 0.5.
    `contract` is the contract of the model's package; the header `isthmus-contract` has the contract of the rows used.
    """

    model: str
    contract: str
    package: str
    predictions: Annotated[
        list[float | str | list[str] | None],
        Meta(description="Numbers (non-finite ones as strings), or class names of a classifier."),
    ]
    statuses: dict[str, list[FieldStatus]]
    classes: list[str] | UnsetType = UNSET
    probabilities: list[list[float | Literal["NaN", "Infinity", "-Infinity"]]] | UnsetType = UNSET


class ModelInput(Struct, frozen=True):
    """A value that a model reads."""

    name: str
    dtype: str


class ModelTensor(Struct):
    """A tensor of a model; a dimension of variable size has a name."""

    name: str
    datatype: Annotated[str, Meta(description="Open Inference Protocol name.", examples=["FP32"])]
    shape: list[int | str]


class RoleCounts(Struct):
    """Counts of one model in the worker that answers, since the trial began there."""

    requests: int
    failures: int
    p99_ms: Annotated[float | None, Meta(description="99th percentile of recent runs over a single row.")]


class CandidateState(Struct):
    """A candidate next to the deployed package; `refused` is the reason it gets no more requests.

    `deployed` and `tried` count requests of the two models in the worker that answers.
    """

    package: str
    contract: str
    precision: str
    role: Literal["shadow", "canary"]
    share: Annotated[float, Meta(description="Fraction of requests that it answers; 0 for a shadow.")]
    deployed_at: _Micros
    deployed: RoleCounts
    tried: RoleCounts
    compared: Annotated[int, Meta(description="Predictions of a shadow that were compared.")]
    differing: Annotated[int, Meta(description="Compared predictions that differ by more than `tolerance`.")]
    worst: float | Literal["Infinity"]
    tolerance: float
    dropped: Annotated[int, Meta(description="Requests that a shadow skipped because too many were waiting.")]
    refused: str | None = None


class ProbationState(Struct):
    """A deployment that the server undoes if it fails, or if only it misses the latency objective.

    `deployed` and `former` count requests of the new and the previous model in the worker that answers.
    """

    before: Annotated[str, Meta(description="Package that the server goes back to.")]
    until: _Micros
    deployed: RoleCounts
    former: RoleCounts
    refused: Annotated[str | None, Meta(description="Reason it is being undone.")] = None
    problem: Annotated[str | None, Meta(description="Reason the server cannot go back.")] = None


class UndoneState(Struct):
    """A deployment that the server has undone."""

    package: str
    why: str


class ModelState(Struct):
    """A deployed model; `current` is false if features it reads have changed since its export, and `outdated` says why.

    `contract` is the contract of its package. `undone` is present if an automatic rollback restored the model. A model
    of tensors has `tensors`, `outputs` and `max_sizes` (largest value of each named dimension) instead of `inputs`.
    """

    model: str
    package: str
    contract: str
    service: str
    precision: str
    threads: int
    device: ServingDevice
    deployed_at: _Micros
    current: bool
    inputs: list[ModelInput]
    outdated: str | None = None
    candidate: CandidateState | UnsetType = UNSET
    probation: ProbationState | UnsetType = UNSET
    undone: UndoneState | UnsetType = UNSET
    tensors: list[ModelTensor] | UnsetType = UNSET
    outputs: list[ModelTensor] | UnsetType = UNSET
    max_sizes: dict[str, int] | UnsetType = UNSET


class Models(Struct):
    """The deployed models, and the reason the last deployment was refused, if it was."""

    models: list[ModelState]
    refused: str | None = None


class PublishedState(Struct):
    """The state of a view in the online store; `refused` says what is wrong with its rows, if anything.

    `materialized_at` is the time as of which values were computed. `known_until` is the time until which every known
    row was written. Both are microseconds since 1970 UTC.
    """

    materialized_at: int | None = None
    known_until: int | None = None
    age_seconds: Annotated[float | None, Meta(description="Seconds from `known_until` to the server's time.")] = None
    ttl_seconds: Annotated[float | None, Meta(description="Seconds until a value expires; null for never.")] = None
    freshness_seconds: Annotated[float | None, Meta(description="Age of the newest row, pushed rows included.")] = None
    freshness_objective_seconds: Annotated[float | None, Meta(description="Maximum allowed age.")] = None
    pending: Annotated[bool, Meta(description="Rows are being written, or their writer was killed.")] = False
    refused: str | None = None


class LatencyState(Struct):
    """Latency since the server started, interpolated linearly within histogram buckets."""

    count: int
    p50_ms: float
    p99_ms: float


class HistoryState(Struct):
    """An event in the history of deployments."""

    at: _Micros
    action: Literal["deploy", "promote", "rollback", "shadow", "canary", "drop", "refuse"]
    model: str
    digest: str
    contract: str
    precision: str
    why: str


class StatusAnswer(Struct):
    """State of the server, and of its project as of the last `isthmus status` or deployment.

    `project` is absent if the project's folder is elsewhere; `problems` lists what could not be read.
    """

    name: str
    contract: str
    now: Annotated[int, Meta(description="The server's time, in microseconds since 1970 UTC.")]
    views: dict[str, PublishedState]
    models: list[ModelState]
    refused: str | None
    latency: Annotated[dict[str, LatencyState], Meta(description="By route; under a model's name, its runs alone.")]
    latency_objective_ms: Annotated[float, Meta(description="Objective for the p99 of answers.")]
    history: Annotated[list[HistoryState], Meta(description="Newest first.")]
    project: ProjectStatus | UnsetType = UNSET
    problems: list[str] = []


class Health(Struct):
    """The process is up."""

    status: Literal["up"]


class Ready(Struct):
    """The contract is loaded and Redis answers; `model` is the deployed model, if any."""

    status: Literal["ready"]
    project: str
    contract: str
    model: str | None


class ProblemAnswer(Struct):
    """One problem among several."""

    where: str
    found: str
    expected: str


class ErrorAnswer(Struct, omit_defaults=True):
    """The error: where it is, what was found, what was expected, and what to do.

    `error` is the name of the error class. Under `/v2` it is the message, as the Open Inference Protocol requires, and
    `kind` is the class.
    """

    error: str
    where: str
    found: str
    expected: str
    remedy: str
    kind: str | UnsetType = UNSET
    problems: list[ProblemAnswer] | UnsetType = UNSET
    example: Annotated[dict[str, Any], Meta(description="`/predict` only: a valid body.")] | UnsetType = UNSET
