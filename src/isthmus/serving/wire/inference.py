"""Messages of the Open Inference Protocol, version 2, and of Triton's extension "binary_tensor_data".

The protocol is KServe's (https://github.com/kserve/open-inference-protocol, inference_rest.md). In the extension, the
bytes of each tensor with `binary_data_size` follow the JSON, in order; a header has the length of the JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

HEADER = "Inference-Header-Content-Length"
"""Header with the length of the JSON in a body with binary tensors."""

EXTENSIONS = ("binary_tensor_data",)
PLATFORM = "onnx_onnxv1"
"""The protocol's name for models that run in ONNX Runtime."""

MODEL = "/v2/models/{model}"
VERSION = f"{MODEL}/versions/{{version}}"
INFER = (f"{MODEL}/infer", f"{VERSION}/infer")
"""Paths that run a model."""

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
