"""The featurizer of a tabular student, `head.json`, for clients that compute the core's inputs without ONNX Runtime."""

from collections.abc import Sequence

from isthmus.distill.onnx.runtime import session
from isthmus.distill.tabular.graph import REFUSED, head_graph
from isthmus.distill.tabular.student import Student, core_tensors
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.features.errors import GateFailed
from isthmus.features.request.layout import VALID, Layout, input_name
from isthmus.features.request.onnxbytes import UnreadableGraph
from isthmus.package.featurizer.form import HEAD, RawInput
from isthmus.package.featurizer.trace import GraphInput, traced
from isthmus.package.inputs import ModelInput


def head(student: Student, request: RequestInputs, inputs: Sequence[ModelInput]) -> bytes:
    """Return the content of `head.json` for the raw `inputs` of the graph.

    Raises:
        GateFailed: a request transform uses an operator that does not compute the same bits in every language.
    """
    model = head_graph(student, request)
    outputs = {tensor.name: tensor.element for tensor in core_tensors(student)}
    refused = REFUSED if any(output.name == REFUSED for output in model.graph.output) else None
    graph: bytes = model.SerializeToString(deterministic=True)
    try:
        return traced(graph, _sources(inputs), outputs, refused, lambda single: session(single, 1))
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
