"""Messages of the Open Inference Protocol, version 2, and of Triton's extensions of it in `EXTENSIONS`.

The protocol is KServe's (https://github.com/kserve/open-inference-protocol, inference_rest.md), and the extensions are
in docs/protocol of https://github.com/triton-inference-server/server. In "binary_tensor_data", the bytes of each tensor
with `binary_data_size` follow the JSON, in order; a header has the length of the JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

HEADER = "Inference-Header-Content-Length"
"""Header with the length of the JSON in a body with binary tensors."""

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
PLATFORM = "onnx_onnxv1"
"""The protocol's name for models that run in ONNX Runtime."""

MODEL = "/v2/models/{model}"
VERSION = f"{MODEL}/versions/{{version}}"
INFER = (f"{MODEL}/infer", f"{VERSION}/infer")
"""Paths that run a model."""
STATISTICS = ("/v2/models/stats", f"{MODEL}/stats")
UNMEASURED = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
INDEX = "/v2/repository/index"
CHANGES = ("/v2/repository/models/{model}/load", "/v2/repository/models/{model}/unload")
"""Paths that would load a model or remove it."""

DATATYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "UINT8", "int32": "INT32", "int64": "INT64", "float": "FP32", "double": "FP64",
    "string": "BYTES",
}  # fmt: skip
"""The protocol's name for each element type of a package's tensors."""

_DATA: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"type": ["boolean", "number", "string"]}, {"type": "array"}]},
    "description": "The elements in row-major order, flat or nested to match the shape. Non-finite numbers are "
    '"NaN", "Infinity" or "-Infinity".',
}
_Data = Annotated[Raw, Meta(extra_json_schema=_DATA)]
_Shape = list[Annotated[int, Meta(ge=0, le=2**53)]]
_BinarySize = Annotated[int, Meta(ge=0, le=2**53, description="Bytes of the tensor after the JSON, instead of `data`.")]


class InputParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of an input."""

    binary_data_size: _BinarySize | UnsetType = UNSET


class OutputParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a requested output."""

    binary_data: Annotated[bool, Meta(description="Send the elements after the JSON.")] | UnsetType = UNSET


class RequestParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a request."""

    binary_data_output: Annotated[bool, Meta(description="Default for outputs without `binary_data`.")] = False


class RequestInput(Struct, forbid_unknown_fields=True):
    """An input tensor."""

    name: str
    shape: _Shape
    datatype: Annotated[str, Meta(examples=["FP32"])]
    parameters: InputParameters = InputParameters()
    data: _Data | UnsetType = UNSET


class RequestOutput(Struct, forbid_unknown_fields=True):
    """A requested output."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferRequest(Struct, forbid_unknown_fields=True):
    """The tensors for a model, and the outputs to return: all of them if `outputs` is empty."""

    inputs: list[RequestInput]
    id: Annotated[str, Meta(description="Returned in the answer.")] | UnsetType = UNSET
    parameters: RequestParameters = RequestParameters()
    outputs: list[RequestOutput] = []
    model_name: Annotated[str | None, Meta(description="Sent by KServe's client: the name in the path.")] = None


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A tensor request: its JSON, and the binary data after it."""

    message: InferRequest
    binary: memoryview


class ResponseParameters(Struct, frozen=True, omit_defaults=True):
    """Parameters of an output."""

    binary_data_size: _BinarySize | UnsetType = UNSET


class ResponseOutput(Struct, omit_defaults=True):
    """An output tensor; its elements are flat, or come after the JSON."""

    name: str
    datatype: str
    shape: _Shape
    parameters: ResponseParameters = ResponseParameters()
    data: list[bool | int | float | str] | UnsetType = UNSET


class InferAnswer(Struct):
    """The outputs of a model; `model_version` is the digest of its package."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str | UnsetType = UNSET


class TensorMetadata(Struct, omit_defaults=True):
    """A tensor of a model; a dimension of variable size is -1.

    The parameter `classes` of an output lists its class names, in the order of the last axis. `several` is true if any
    number of them may be right.
    """

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, list[str] | bool] = {}


class ModelMetadata(Struct):
    """A model of tensors; its versions are the digests of the available packages."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfiguration(Struct):
    """A tensor in a model's configuration, such as of type `TYPE_FP32`."""

    name: str
    data_type: str
    dims: list[int]


class ModelConfiguration(Struct):
    """Triton's ModelConfig of a model. Its `max_batch_size` is 0: shapes include the rows, and nothing is batched."""

    name: str
    default_model_filename: str
    input: list[TensorConfiguration]
    output: list[TensorConfiguration]
    instance_group: list[dict[str, str | int]]
    parameters: dict[str, dict[str, str]]
    platform: str = "onnxruntime_onnx"
    backend: str = "onnxruntime"
    max_batch_size: int = 0


class RepositoryIndexRequest(Struct, forbid_unknown_fields=True):
    """A request for the deployed models; with `ready`, for those that can answer."""

    ready: bool = False


class RepositoryEntry(Struct):
    """A version of a deployed model, and the reason why it cannot answer."""

    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str


class DurationStatistic(Struct, frozen=True):
    """A number of events and their time in nanoseconds."""

    count: int = 0
    ns: int = 0


class ModelStatistics(Struct):
    """Counts of a model since the server started, all versions together.

    `inference_count` counts rows, `execution_count` runs; `last_inference` is in milliseconds since 1970 UTC. In
    `inference_stats`, `success` and `fail` are runs with and without outputs. The other parts are not measured.
    """

    name: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: dict[str, DurationStatistic]
    batch_stats: list[dict[str, Any]] = []


class Statistics(Struct):
    """The statistics of each model."""

    model_stats: list[ModelStatistics]


class ServerMetadata(Struct):
    """The server, its version, and its protocol extensions."""

    name: str
    version: str
    extensions: list[str]


class ServerLive(Struct):
    """The process is up."""

    live: bool


class ServerReady(Struct):
    """Every deployed model can answer. The protocol's text names the field `live`, its clients `ready`."""

    live: bool
    ready: bool


class ModelReady(Struct):
    """The model can answer."""

    name: str
    ready: bool
