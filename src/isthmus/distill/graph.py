"""The ONNX graph of a student: raw values in, a probability out, everything else inside.

Written node by node: `torch.onnx.export` takes four seconds for these few nodes, has no string tensors, and writes
source positions into the file. Export compares the graph with torch on the golden rows, so the two cannot part.
"""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper
from torch import nn

from isthmus.distill.building import Building
from isthmus.distill.head import Head
from isthmus.distill.preparation import NUMBERS
from isthmus.distill.student import Student
from isthmus.features.contract import TransformContract
from isthmus.features.rowgraph import ELEMENTS, MASKS, NOTES, VALID, Layout, found, given
from isthmus.features.types import String

OUTPUT = "probability"


def graph(student: Student, head: Head | None = None) -> onnx.ModelProto:
    """The graph of a student.

    Its inputs are `numeric`, float32 (N, numbers) with NaN for null, and `categories`, string (N, categories) with ""
    for null, each only if the student has such inputs that are not computed; and what request transforms take. Its
    output is `probability`, float32 (N,); NaN where a request transform refuses a row.

    Args:
        student: the network.
        head: request transforms, whose fields are the network's last numbers and its last categories.
    """
    build, head = Building(), head or Head()
    inputs: list[onnx.ValueInfoProto] = []
    numbers, texts = _made(build, head, inputs)
    preparation = student.prepare.preparation
    fed = {}
    if direct := len(preparation.numbers) - len(numbers):
        inputs.append(helper.make_tensor_value_info("numeric", TensorProto.FLOAT, ["N", direct]))
    if preparation.numbers:
        every = ["numeric", *numbers] if direct else numbers
        fed["numeric"] = build.add("Concat", every, "every_number", axis=1) if numbers else "numeric"
    if direct := len(preparation.texts) - len(texts):
        inputs.append(helper.make_tensor_value_info("categories", TensorProto.STRING, ["N", direct]))
    for place in range(len(preparation.texts)):
        if place < direct:
            column = build.once(f"column_{place}", np.array(place))
            fed[f"text_{place}"] = build.add("Gather", ["categories", column], f"text_{place}", axis=1)
        else:
            fed[f"text_{place}"] = texts[place - direct]
    build.include(onnx.load_model_from_string(student.prepare.graph), "prepare", fed)
    parts = [f"prepare/{NUMBERS}"]
    for place, table in zip(preparation.embedded, student.tables, strict=True):
        weights = build.constant(f"embedding_{place}", table.weight.detach().numpy())
        parts.append(build.add("Gather", [weights, f"prepare/place_{place}"], f"embedded_{place}", axis=0))
    value = build.add("Concat", parts, "features", axis=1)
    linears = [layer for layer in student.layers if isinstance(layer, nn.Linear)]
    for position, layer in enumerate(linears):
        weight = build.constant(f"weight_{position}", layer.weight.detach().numpy())
        bias = build.constant(f"bias_{position}", layer.bias.detach().numpy())
        value = build.add("Gemm", [value, weight, bias], f"linear_{position}", transB=1)
        if layer is not linears[-1]:
            value = build.add("Relu", [value], f"relu_{position}")
    logit = build.add("Squeeze", [value, build.constant("last_axis", np.array([1], np.int64))], "logit")
    build.add("Sigmoid", [logit], "chance" if head.transforms else OUTPUT)
    if head.transforms:
        _refuse(build, head)
    return build.model("student", inputs, [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["N"])])


def _made(build: Building, head: Head, inputs: list[onnx.ValueInfoProto]) -> tuple[list[str], list[str]]:
    """Puts request transforms into a graph; the numbers, as columns (N, 1), and the texts, (N,)."""
    if not head.transforms:
        return [], []
    whole = Layout.of({column.name: column.dtype for column in head.taken})
    inputs += [_rows(given(element), _TENSORS[element], len(names)) for element, names in whole.given.items()]
    inputs.append(_rows(given(VALID), TensorProto.BOOL, len(whole.masks)))
    layouts = {}
    for transform in head.transforms:
        model = onnx.load_model_from_string(transform.graph)
        part = layouts[transform.name] = Layout.loads(next(m.value for m in model.metadata_props if m.key == NOTES))
        fed = {given(element): _picked(build, transform, element, whole.given[element], names)
               for element, names in part.given.items()}  # fmt: skip
        fed[given(VALID)] = _picked(build, transform, VALID, whole.masks, part.masks)
        build.include(model, transform.name, fed)
    numbers: list[str] = []
    texts: list[str] = []
    for transform, field in head.computed:
        name, layout, element = transform.full_name(field.name), layouts[transform.name], ELEMENTS[field.dtype.name]
        value = _row(build, f"{transform.name}/{found(element)}", layout.found[element].index(field.name))
        valid = _row(build, f"{transform.name}/{MASKS}", layout.fields.index(field.name))
        if field.dtype == String:
            nothing = build.once("nothing", np.array([""], object))
            texts.append(build.add("Where", [valid, value, nothing], f"{name}/or_nothing"))
            continue
        number = build.add("Cast", [value], f"{name}/number", to=TensorProto.FLOAT)
        number = build.add("Where", [valid, number, build.once("null", np.float32(np.nan))], f"{name}/or_null")
        numbers.append(build.add("Unsqueeze", [number, build.once("as_column", np.array([1]))], name))
    return numbers, texts


def _picked(
    build: Building, transform: TransformContract, what: str, rows: Sequence[str], wanted: Sequence[str]
) -> str:
    """The rows of a given tensor that a transform takes, in its order."""
    if list(rows) == list(wanted):
        return given(what)
    parts = [_slice(build, given(what), rows.index(name)) for name in wanted]
    return build.add("Concat", parts, f"{transform.name}/{what}/picked", axis=0) if len(parts) > 1 else parts[0]


def _slice(build: Building, tensor: str, place: int) -> str:
    """A row of a tensor, of shape (1, N). No Gather: of a row of texts, ONNX Runtime's copies the first one only."""
    first, end = (build.once(f"place_{at}", np.array([at])) for at in (place, place + 1))
    return build.add("Slice", [tensor, first, end, build.once("place_0", np.array([0]))], f"{tensor}/{place}")


def _row(build: Building, tensor: str, place: int) -> str:
    """A row of a tensor, of shape (N,)."""
    axis = build.once("place_0", np.array([0]))
    return build.add("Squeeze", [_slice(build, tensor, place), axis], f"{tensor}/{place}/flat")


def _rows(name: str, tensor: int, count: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor, [count, "N"])


_TENSORS = {
    "bool": TensorProto.BOOL, "int32": TensorProto.INT32, "int64": TensorProto.INT64, "float": TensorProto.FLOAT,
    "double": TensorProto.DOUBLE, "string": TensorProto.STRING,
}  # fmt: skip


def _refuse(build: Building, head: Head) -> None:
    """Where a request transform refuses a row, there is no probability."""
    refused = []
    axis = build.once("place_0", np.array([0]))
    for transform in head.transforms:
        count = len(transform.fields)
        ends = [build.once(f"place_{end}", np.array([end])) for end in (count, 2 * count)]
        name = f"{transform.name}/refused"
        masks = build.add("Slice", [f"{transform.name}/{MASKS}", *ends, axis], f"{name}/masks")
        counted = build.add("Cast", [masks], f"{name}/counted", to=TensorProto.INT32)
        most = build.add("ReduceMax", [counted, axis], f"{name}/any", keepdims=0)
        refused.append(build.add("Cast", [most], name, to=TensorProto.BOOL))
    anywhere, *others = refused
    for other in others:
        anywhere = build.add("Or", [anywhere, other], f"{other}/or_before")
    build.add("Where", [anywhere, build.once("null", np.float32(np.nan)), "chance"], OUTPUT)
