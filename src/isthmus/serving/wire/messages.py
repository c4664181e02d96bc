"""Requests and answers of the API: the types behind its decoding and its OpenAPI document."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

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
"""Column name to its values, undecoded: the contract says which type each column has."""

_Cached = Annotated[bool, Meta(description="Sent by Feast's client; there is one contract.")]
_Transformed = Annotated[bool, Meta(description="Sent by Feast's client; rows are written as they are.")]
_Micros = Annotated[int, Meta(description="Microseconds since 1970 UTC.")]


class LookupRequest(Struct, forbid_unknown_fields=True):
    """A lookup: features as `view:feature`, or the name of a feature service, for the rows of `entities`."""

    entities: Annotated[
        Columns,
        Meta(
            description="Join key to its values, one per row, and so the request fields that a request transform "
            "takes. The answer has the same order. A value of an array field is a list, of the size that it declares.",
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
    """The names of the result columns, and the contract that they were read under.

    `problems` says which stored rows are damaged, and which keys another program has in Redis: their status is INVALID,
    and all their values are null.
    """

    feature_names: list[str]
    contract: str
    problems: list[str] | UnsetType = UNSET


class FeatureVector(Struct):
    """One column of an answer. Non-finite numbers are "NaN", "Infinity" and "-Infinity"; bytes are Base64.

    A value of an array feature is a list.
    """

    values: list[Scalar | list[Scalar] | None]
    statuses: list[FieldStatus]
    event_timestamps: list[Annotated[str, Meta(extra_json_schema={"format": "date-time"})]]


class LookupAnswer(Struct):
    """A column for each join key of the request, then a column for each feature."""

    metadata: Metadata
    results: list[FeatureVector]


class ValuesAnswer(Struct):
    """The compact format: a list of values per name, and per view its status for each row."""

    metadata: Metadata
    values: list[list[Scalar | list[Scalar] | None]]
    statuses: dict[str, list[FieldStatus]]


class PushRequest(Struct, forbid_unknown_fields=True):
    """Rows for the online store, in Feast's form."""

    push_source_name: Annotated[str, Meta(description="The view that the rows are of.", examples=["punctuality"])]
    df: Annotated[
        Columns,
        Meta(
            description="Column to its values, one per row: the join keys, `event_timestamp`, every feature of the "
            "view, and `known_at` unless it is the server's present. Times are text as in RFC 3339, with a zone, or "
            "whole microseconds since 1970 UTC; none may lie in the future. A value of an array feature is a list, of "
            "the size that it declares if it does.",
            examples=[{
                "carrier": ["UA"], "event_timestamp": ["2027-01-15T07:30:00Z"], "late_rate": [0.25], "flights": [None]
            }],
        ),
    ]  # fmt: skip
    allow_registry_cache: _Cached = True
    to: Annotated[
        Literal["online", "offline", "online_and_offline"],
        Meta(
            description="Where the rows go: to the online store, to the history of the view within its declared "
            "interval, or to both."
        ),
    ] = "online_and_offline"
    transform_on_write: _Transformed = True


class WriteRequest(Struct, forbid_unknown_fields=True):
    """Rows for the online store, as Feast's SDK writes them with `online_store: {type: remote}`."""

    feature_view_name: Annotated[str, Meta(description="The view that the rows are of.", examples=["punctuality"])]
    df: Annotated[
        Columns,
        Meta(
            description="Column to its values, one per row: the join keys, `event_timestamp`, every feature of the "
            "view, and `created`, where null or no column is the server's present. Times without a zone are UTC, "
            "UnixTimestamp features are whole seconds since 1970 UTC; no row may lie in the future.",
            examples=[{
                "carrier": ["UA"], "event_timestamp": ["2027-01-15T07:30:00"], "created": [None], "late_rate": [0.25],
                "flights": [None],
            }],
        ),
    ]  # fmt: skip
    allow_registry_cache: _Cached = True
    transform_on_write: _Transformed = True


class PushAnswer(Struct):
    """How many rows were accepted, and how many of them replaced what was stored: the rest were older than that."""

    rows: int
    written: int


class PredictRequest(Struct, forbid_unknown_fields=True):
    """A prediction for each row of join keys and request fields."""

    model: str | None = None
    entities: Annotated[Columns, Meta(description="Join key to its values, one per row.")] = {}
    request: Annotated[
        Columns,
        Meta(description="Request field to its values, one per row. A field named like a join key may be left out."),
    ] = {}


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """A text behind a prompt."""

    prompt: Annotated[
        str, Meta(description="What a user asks. What looks like a control token in it is text.", examples=["Hello"])
    ]
    model: str | None = None
    entities: Annotated[
        Columns,
        Meta(description="Join key to its value, a list of one, of whose features the model's prompt tells."),
    ] = {}
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class EventText(Struct):
    """An event `text`: what the text grows by."""

    text: str


class EventEnd(Struct):
    """An event `end`: why the text ends, and how many tokens it took."""

    reason: Annotated[
        Literal["end", "length", "time"],
        Meta(description="The model ended it, no more tokens were asked for or fit, or it took too long."),
    ]
    prompt_tokens: int
    tokens: int


class PredictAnswer(Struct):
    """A prediction per row, and the status of each view for the row.

    A model of classes answers with the name of the likeliest class, or null where it has no answer, and with the
    probabilities of all `classes`, in their order. `contract` is the contract of the model's package; the header
    `isthmus-contract` has that of the rows it was fed.
    """

    model: str
    contract: str
    package: str
    predictions: Annotated[
        list[float | str | None],
        Meta(description="Numbers, or a word for a number that JSON lacks; of a model of classes their names."),
    ]
    statuses: dict[str, list[FieldStatus]]
    classes: list[str] | UnsetType = UNSET
    probabilities: list[list[float | Literal["NaN", "Infinity", "-Infinity"]]] | UnsetType = UNSET


class ModelInput(Struct, frozen=True):
    """A value that a model reads."""

    name: str
    dtype: str


class ModelTensor(Struct):
    """A tensor of a model; a size that differs from request to request has a name."""

    name: str
    datatype: Annotated[str, Meta(description="By the Open Inference Protocol.", examples=["FP32"])]
    shape: list[int | str]


class RoleCounts(Struct):
    """What a model has done in the worker that answers, since the candidate was deployed."""

    requests: int
    failures: int
    p99_ms: Annotated[float | None, Meta(description="Of the latest runs over a single row.")]


class CandidateState(Struct):
    """A candidate beside the deployed package; `refused` says why it gets no more requests.

    `deployed` and `tried` count what the two have done since, in the worker that answers.
    """

    package: str
    contract: str
    precision: str
    role: Literal["shadow", "canary"]
    share: Annotated[float, Meta(description="Of requests that it answers; 0 for a shadow.")]
    deployed_at: _Micros
    deployed: RoleCounts
    tried: RoleCounts
    compared: Annotated[int, Meta(description="Predictions of a shadow that were compared.")]
    differing: Annotated[int, Meta(description="Of these, those that differ by more than `tolerance`.")]
    worst: float | Literal["Infinity"]
    tolerance: float
    dropped: Annotated[int, Meta(description="Requests that a shadow did not get, because too many waited.")]
    refused: str | None = None


class ProbationState(Struct):
    """A deployment that the server undoes if it fails, or alone misses the latency objective.

    `deployed` and `former` count what its model and the model before it have done, in the worker that answers.
    """

    before: Annotated[str, Meta(description="The package that the server goes back to.")]
    until: _Micros
    deployed: RoleCounts
    former: RoleCounts
    refused: Annotated[str | None, Meta(description="Why it is being undone.")] = None
    problem: Annotated[str | None, Meta(description="Why there is no way back.")] = None


class UndoneState(Struct):
    """A deployment that the server has undone."""

    package: str
    why: str


class ModelState(Struct):
    """A deployed model; `current` is false, and `outdated` says why, when what it reads has changed since its export.

    `contract` is the contract of its package. `undone` is there where an automatic rollback has put the model in force.
    A model of tensors has `tensors`, `outputs` and the largest of their named sizes in the place of `inputs`.
    """

    model: str
    package: str
    contract: str
    service: str
    precision: str
    threads: int
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
    """The deployed models, and why the last deployment was refused, if it was."""

    models: list[ModelState]
    refused: str | None = None


class PublishedState(Struct):
    """The record of a view in the online store; `refused` says why nothing is known of it.

    `materialized_at` is the moment whose answers were written, `known_until` the known time until which every row was
    written, each in microseconds since 1970 UTC.
    """

    materialized_at: int | None = None
    known_until: int | None = None
    age_seconds: Annotated[float | None, Meta(description="From `known_until` to the server's present.")] = None
    ttl_seconds: Annotated[float | None, Meta(description="How long a value holds; null for ever.")] = None
    freshness_seconds: Annotated[float | None, Meta(description="Age of the newest row, pushed rows included.")] = None
    freshness_objective_seconds: Annotated[float | None, Meta(description="The age that it may have.")] = None
    pending: Annotated[bool, Meta(description="Rows are being written, or whoever wrote them was killed.")] = False
    refused: str | None = None


class LatencyState(Struct):
    """How long something took since the server started, from a histogram: between the bounds of a bucket, linearly."""

    count: int
    p50_ms: float
    p99_ms: float


class HistoryState(Struct):
    """What was done with a package, when, and why."""

    at: _Micros
    action: Literal["deploy", "promote", "rollback", "shadow", "canary", "drop", "refuse"]
    model: str
    digest: str
    contract: str
    precision: str
    why: str


class StatusAnswer(Struct):
    """Where the server stands, and where its project stood when `isthmus status`, or a deployment, looked last.

    `project` is left out where the project's folder is elsewhere; `problems` says what could not be read.
    """

    name: str
    contract: str
    now: Annotated[int, Meta(description="The server's present, in microseconds since 1970 UTC.")]
    views: dict[str, PublishedState]
    models: list[ModelState]
    refused: str | None
    latency: Annotated[dict[str, LatencyState], Meta(description="By route, and by model for its runs alone.")]
    latency_objective_ms: Annotated[float, Meta(description="What the p99 of its answers shall not be above.")]
    history: Annotated[list[HistoryState], Meta(description="The newest first.")]
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
    """What went wrong, where, what would have been accepted, and what to do.

    `error` is the class of the error. Under `/v2` it is the message, as the Open Inference Protocol has it, and `kind`
    is the class.
    """

    error: str
    where: str
    found: str
    expected: str
    remedy: str
    kind: str | UnsetType = UNSET
    problems: list[ProblemAnswer] | UnsetType = UNSET
    example: Annotated[dict[str, Any], Meta(description="Of `/predict`: a body that is right.")] | UnsetType = UNSET
