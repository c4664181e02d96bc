"""Writes the ONNX graph of a student node by node: `torch.onnx.export` is slow and has no string tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper
from torch import nn

from isthmus.distill.onnx.builder import Building
from isthmus.distill.onnx.runtime import session
from isthmus.distill.tabular.preparation import NUMBERS
from isthmus.distill.tabular.student import PLACES, Student, core_tensors
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.features.errors import GateFailed
from isthmus.features.request.layout import MASKS, NOTES, VALID, Layout, input_name, output_name
from isthmus.features.request.onnxbytes import UnreadableGraph
from isthmus.features.types import String
from isthmus.package.featurizer.form import HEAD, RawInput
from isthmus.package.featurizer.trace import GraphInput, build_head
from isthmus.package.inputs import ModelInput

REFUSED = "refused"


def graph(
    student: Student, request: RequestInputs | None = None, text: onnx.ModelProto | None = None
) -> onnx.ModelProto:
    """Return the ONNX graph of a tabular student, from raw inputs to its output in float32, to export the student.

    `text` is the graph of a network. Its only output is added to the last linear layer's output, and its inputs come
    first. This call modifies `text`.

    The graph's inputs are `numeric`, float32 (N, numbers) with NaN for null, `categories`, string (N, categories) with
    "" for null, and the raw inputs of the request transforms in `request`. An input without columns is left out. Fields
    that request transforms compute are not inputs, since the graph computes them. Boolean inputs are uint8, since ONNX
    Runtime's Swift package does not accept bool. The output is NaN in rows that a request transform rejects.
    """
    build, request = Building(), request or RequestInputs()
    inputs: list[onnx.ValueInfoProto] = []
    prepared = _prepared(build, student, request, inputs)
    parts = [prepared.numbers]
    for place, table in zip(prepared.places, student.tables, strict=True):
        weights = build.constant(f"embedding_{place}", table.weight.detach().numpy())
        parts.append(build.add("Gather", [weights, place], f"embedded_{place}", axis=0))
    value = build.add("Concat", parts, "features", axis=1)
    linears = [layer for layer in student.layers if isinstance(layer, nn.Linear)]
    for position, layer in enumerate(linears):
        weight = build.constant(f"weight_{position}", layer.weight.detach().numpy())
        bias = build.constant(f"bias_{position}", layer.bias.detach().numpy())
        value = build.add("Gemm", [value, weight, bias], f"linear_{position}", transB=1)
        if layer is not linears[-1]:
            value = build.add("Relu", [value], f"relu_{position}")
    if text is not None:
        inputs = [*text.graph.input, *inputs]
        (read,) = build.include(text, "text", {item.name: item.name for item in text.graph.input}).values()
        value = build.add("Add", [value, read], "joined")
    answer = student.answer
    answer.write(build, value, "answer" if prepared.refused else answer.name)
    if prepared.refused:
        nothing, refused = build.constant("null", np.float32(np.nan)), _flat(build, prepared.refused, "refused")
        for axis in range(1, len(answer.shape)):
            places = build.constant(f"axis_{axis}", np.array([axis]))
            refused = build.add("Unsqueeze", [refused, places], f"wide_{axis}")
        build.add("Where", [refused, nothing, "answer"], answer.name)
    outputs = [helper.make_tensor_value_info(answer.name, TensorProto.FLOAT, [*answer.shape])]
    return build.model("student", inputs, outputs)


def head_graph(student: Student, request: RequestInputs) -> onnx.ModelProto:
    build = Building()
    inputs: list[onnx.ValueInfoProto] = []
    prepared = _prepared(build, student, request, inputs, truth=TensorProto.BOOL)
    build.add("Identity", [prepared.numbers], NUMBERS)
    axis = build.constant("last_axis", np.array([1], np.int64))
    columns = [build.add("Unsqueeze", [place, axis], f"{place}/column") for place in prepared.places]
    if columns:
        places = build.add("Concat", columns, "every_place", axis=1)
        build.add("Cast", [places], PLACES, to=TensorProto.INT32)
    outputs = [
        helper.make_tensor_value_info(tensor.name, TensorProto.DataType.Value(tensor.element.upper()), tensor.shape)
        for tensor in core_tensors(student)
    ]
    if prepared.refused:
        build.add("Identity", [_flat(build, prepared.refused, "flat")], REFUSED)
        outputs.append(helper.make_tensor_value_info(REFUSED, TensorProto.BOOL, ["N"]))
    return build.model("head", inputs, outputs)


def head(student: Student, request: RequestInputs, inputs: Sequence[ModelInput]) -> bytes:
    """Return the content of `head.json`, which tells clients without ONNX Runtime how to prepare raw inputs.

    `request` has the request transforms in the student, and `inputs` are the raw inputs of its graph. Raise a
    GateFailed if an input is an array, or if a request transform uses an operator whose results are not bitwise equal
    in every language.
    """
    if arrays := [item.name for item in inputs if item.size is not None]:
        raise GateFailed(HEAD, f"the student reads {arrays[0]}, an array", expected="numbers, times and Strings",
                         remedy="run the files in ONNX or ORT format")  # fmt: skip
    model = head_graph(student, request)
    outputs = {tensor.name: tensor.element for tensor in core_tensors(student)}
    refused = REFUSED if any(output.name == REFUSED for output in model.graph.output) else None
    graph: bytes = model.SerializeToString(deterministic=True)
    try:
        return build_head(graph, _sources(inputs), outputs, refused, lambda single: session(single, 1))
    except UnreadableGraph as error:
        raise GateFailed(
            HEAD,
            f"a request transform of the student has {error}",
            expected="operators with bitwise equal results in every language",
            remedy="use other functions in the features of the student, or run the files in ONNX or ORT format",
        ) from error


def _sources(inputs: Sequence[ModelInput]) -> list[GraphInput]:
    numbers = [RawInput(item.name, item.dtype.name, "number") for item in inputs if item.is_number]
    texts = [RawInput(item.name, item.dtype.name, "text") for item in inputs if item.is_category]
    types = {item.name: item.dtype for item in inputs if item.row}
    layout = Layout.of(types)
    sources = [GraphInput("numeric", "float", numbers, rows=True), GraphInput("categories", "string", texts, rows=True)]
    for element, names in layout.inputs.items():
        values = [RawInput(name, types[name].name, "value") for name in names]
        sources.append(GraphInput(input_name(element), element, values))
    masks = [RawInput(name, types[name].name, "valid") for name in layout.masks]
    return [*sources, GraphInput(input_name(VALID), "bool", masks)]


class _Prepared(NamedTuple):
    """Names of tensors before the network: numbers (N, width), indexes into embeddings (N,), rejected rows (1, N)."""

    numbers: str
    places: list[str]
    refused: str | None


def _prepared(
    build: Building, student: Student, request: RequestInputs, inputs: list[onnx.ValueInfoProto],
    truth: int = TensorProto.UINT8,
) -> _Prepared:  # fmt: skip
    computed = _computed(build, request, inputs, truth)
    preparation = student.prepare.preparation
    prepare = onnx.load_model_from_string(student.prepare.graph)
    fed = {}
    if direct := len(preparation.numbers) - len(computed.numbers):
        inputs.append(helper.make_tensor_value_info("numeric", TensorProto.FLOAT, ["N", direct]))
        fed["numeric"] = "numeric"
    if computed.numbers:
        rows = [build.add("Transpose", ["numeric"], "given_numbers", perm=[1, 0])] if direct else []
        # Computed numbers already have shape (1, N), so skip the preparation's transpose.
        turned = next(node.output[0] for node in prepare.graph.node if node.input[0] == "numeric")
        fed[turned] = build.add("Concat", [*rows, *computed.numbers], "every_number", axis=0)
    if direct := len(preparation.texts) - len(computed.texts):
        inputs.append(helper.make_tensor_value_info("categories", TensorProto.STRING, ["N", direct]))
    for place in range(len(preparation.texts)):
        if place < direct:
            column = build.constant(f"column_{place}", np.array(place))
            fed[f"text_{place}"] = build.add("Gather", ["categories", column], f"text_{place}", axis=1)
        else:
            fed[f"text_{place}"] = computed.texts[place - direct]
    prepared = build.include(prepare, "prepare", fed)
    places = [prepared[f"place_{place}"] for place in preparation.embedded]
    return _Prepared(prepared[NUMBERS], places, computed.refused)


class _Computed(NamedTuple):
    """Names of the request transforms' tensors: numbers (1, N), texts (N,), and the mask of rejected rows (1, N)."""

    numbers: list[str]
    texts: list[str]
    refused: str | None


def _computed(build: Building, request: RequestInputs, inputs: list[onnx.ValueInfoProto], truth: int) -> _Computed:
    if not request.transforms:
        return _Computed([], [], None)
    fed_layout = Layout.of({column.name: column.dtype for column in request.columns})
    inputs += [
        _rows(input_name(kind), truth if kind == "bool" else TensorProto.DataType.Value(kind.upper()), len(names))
        for kind, names in fed_layout.inputs.items()
    ]
    inputs.append(_rows(input_name(VALID), truth, len(fed_layout.masks)))
    parts = {**fed_layout.inputs, VALID: fed_layout.masks}
    row: dict[tuple[str, str], str] = {}
    for kind, names in parts.items():
        tensor = input_name(kind)
        if kind in ("bool", VALID) and truth != TensorProto.BOOL:
            tensor = build.add("Cast", [tensor], f"{tensor}/true", to=TensorProto.BOOL)
        row |= zip([(kind, name) for name in names], build.rows(tensor, len(names)), strict=True)
    values: dict[tuple[str, str], tuple[str, str]] = {}
    refused = None
    for transform in request.transforms:
        model = onnx.load_model_from_string(transform.graph)
        layout = Layout.loads(next(m.value for m in model.metadata_props if m.key == NOTES))
        fed: dict[str, str] = {}
        for kind, names in {**layout.inputs, VALID: layout.masks}.items():
            tensor = input_name(kind)
            split = [f"{tensor}[{place}]" for place in range(len(names))] if len(names) > 1 else [tensor]
            fed |= dict(zip(split, (row[kind, name] for name in names), strict=True))
        outputs = build.include(model, transform.name, fed)
        masks, count = build.rows(outputs[MASKS], 2 * len(layout.fields)), len(layout.fields)
        valid = dict(zip(layout.fields, masks, strict=False))
        for kind, names in layout.outputs.items():
            rows = build.rows(outputs[output_name(kind)], len(names))
            values |= {(transform.name, name): (data, valid[name]) for name, data in zip(names, rows, strict=True)}
        for place, mask in enumerate(masks[count:]):
            if build.constant_value(mask) is not False:
                refused = build.add("Or", [refused, mask], f"{transform.name}/refused/{place}") if refused else mask
    numbers: list[str] = []
    texts: list[str] = []
    for transform, field in request.computed:
        name, (value, valid_mask) = transform.full_name(field.name), values[transform.name, field.name]
        if field.dtype == String:
            value = _or(build, valid_mask, value, build.constant("nothing", np.array([""], object)), name)
            texts.append(_flat(build, value, name))
        else:
            if field.dtype.tensor != "float":
                value = build.add("Cast", [value], f"{name}/number", to=TensorProto.FLOAT)
            numbers.append(_or(build, valid_mask, value, build.constant("null", np.float32(np.nan)), name))
    return _Computed(numbers, texts, refused)


def _or(build: Building, valid: str, value: str, nothing: str, name: str) -> str:
    return value if build.constant_value(valid) else build.add("Where", [valid, value, nothing], f"{name}/or_null")


def _flat(build: Building, row: str, name: str) -> str:
    return build.add("Squeeze", [row, build.constant("row_axis", np.array([0]))], f"{name}/flat")


def _rows(name: str, tensor: int, count: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor, [count, "N"])
