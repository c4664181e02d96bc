"""INT8 graphs that every runtime answers to the bit: against slow references, and in a browser's runtime."""

import hashlib
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
import pyarrow as pa
import pytest
from onnx import TensorProto, helper, numpy_helper

from isthmus.distill.export.export import ExportReport
from isthmus.distill.onnx.primitives import in_primitives
from isthmus.distill.onnx.quantize import quantize
from isthmus.distill.onnx.runtime import ask, ort_format, session, tensor_info
from isthmus.distill.restore import create_task
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.orchestration.runtimes.web import WebRuntime
from isthmus.package.checksums import PackageFiles
from isthmus.package.golden import GoldenCase, TensorBytes
from isthmus.package.manifest import Package, open_package, read_package
from tests.distill.support import material

Array = np.ndarray[Any, Any]
ROWS = 500


def network(kind: str, inputs: int, draw: np.random.Generator) -> onnx.ModelProto:
    """Two layers of a kind and a sigmoid."""
    area = [3, 3] if kind == "Conv" else []
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    value = "x"
    for place, (outputs, taken) in enumerate([(8, inputs), (3, 8)]):
        # A Gemm has its weights in one order, then in the other.
        outputs_first = kind == "Conv" or (kind == "Gemm" and place == 0)
        sizes = (outputs, taken) if outputs_first else (taken, outputs)
        parameters = [draw.normal(size=[*sizes, *area]) / math.sqrt(taken), draw.normal(size=outputs)]
        if kind == "MatMul":
            parameters.pop()
        names = [f"{part}_{place}" for part in ("weight", "bias")][: len(parameters)]
        constants += map(numpy_helper.from_array, (part.astype(np.float32) for part in parameters), names)
        attributes: dict[str, dict[str, Any]] = {"Conv": {"pads": [1] * 4}, "Gemm": {"transB": int(outputs_first)}}
        name = f"layer_{place}"
        nodes.append(helper.make_node(kind, [value, *names], [name], name=name, **attributes.get(kind, {})))
        value = f"after_{place}"
        nodes.append(helper.make_node(["Relu", "Sigmoid"][place], [name], [value], name=value))
    given, gives = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width, *[5 for _ in area]])
        for name, width in (("x", inputs), (value, 3))
    )
    graph = helper.make_graph(nodes, kind, [given], [gives], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def steps(logits: Array) -> Array:
    """What the nodes compute, by NumPy, which rounds each operation once."""
    one, small = np.float32(1), np.clip(logits, np.float32(-16), np.float32(16)) * np.float32(-1 / 32)
    power: Array = np.full_like(small, 1 / 24)
    for coefficient in (1 / 6, 1 / 2, 1, 1):
        power = small * power + np.float32(coefficient)
    for _ in range(5):
        power = power * power
    return one / (power + one)


@pytest.mark.parametrize(("kind", "inputs"), [("Gemm", 3), ("Gemm", 200), ("MatMul", 40), ("Conv", 16)])
def test_a_last_layer_loses_no_bit_and_a_sigmoid_none_but_its_own(kind: str, inputs: int) -> None:
    draw = np.random.default_rng(inputs)
    model = network(kind, inputs, draw)
    fed = {"x": draw.normal(size=(ROWS, inputs, *[5] * (2 * (kind == "Conv")))).astype(np.float32)}
    made_exact = onnx.load_model_from_string(quantize(model, [fed], [kind]))
    layer = next(node for node in made_exact.graph.node if node.name == "layer_1")
    shown = [layer.input[0], layer.output[0]]
    made_exact.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in shown)
    found = ask(session(made_exact.SerializeToString(), 1), fed)
    whole, logits = (found[name] for name in shown)
    np.testing.assert_array_equal(whole, np.rint(whole))
    assert np.abs(whole).max() <= 255
    constants = {constant.name: numpy_helper.to_array(constant) for constant in made_exact.graph.initializer}
    parameters = [constants[name].astype(np.float64) for name in layer.input[1:]]
    # All sums are float64, and each of them is a float32.
    expected = in_float64(kind, whole.astype(np.float64), parameters)
    np.testing.assert_array_equal(expected.astype(np.float32).astype(np.float64), expected)
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(found["after_1"], steps(logits))
    np.testing.assert_allclose(found["after_1"], 1 / (1 + np.exp(-expected)), atol=1e-6)
    # It is the network, as far as eight bits tell.
    plain = ask(session(model.SerializeToString(), 1), fed)["after_1"]
    assert np.sqrt(np.mean((found["after_1"] - plain) ** 2)) < 0.02


def in_float64(kind: str, fed: Array, parameters: list[Array]) -> Array:
    if kind == "Conv":
        padded = np.pad(fed, [(0, 0), (0, 0), (1, 1), (1, 1)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        sums: Array = np.einsum("nihwab,oiab->nohw", windows, parameters[0])
        return sums + parameters[1][:, None, None]
    product: Array = fed @ parameters[0]
    return product + sum(parameters[1:])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_no_sum_passes_what_a_float_holds(size: float) -> None:
    """Of the worst whole numbers that can come in; one output has no weights."""
    draw = np.random.default_rng(7)
    model = network("Gemm", 60, draw)
    for constant in model.graph.initializer[2:]:
        values = numpy_helper.to_array(constant) * np.float32(size)
        values[..., 0] = 0
        constant.CopyFrom(numpy_helper.from_array(values, constant.name))
    fed = {"x": draw.normal(size=(ROWS, 60)).astype(np.float32)}
    graph = onnx.load_model_from_string(quantize(model, [fed], ["Gemm"])).graph
    constants = {constant.name: numpy_helper.to_array(constant) for constant in graph.initializer}
    weights, bias = constants["layer_1/exact/weight"], constants["layer_1/exact/bias"]
    for column, offset in zip(weights.T.tolist(), bias.tolist(), strict=True):
        parts = [Fraction(value) for value in (*column, offset)]
        common = max(part.denominator for part in parts)
        whole = [int(part * common) for part in parts]
        step = math.gcd(*whole) & -math.gcd(*whole)
        assert 255 * sum(map(abs, whole[:-1])) + abs(whole[-1]) <= 2**24 * step
    assert np.abs(bias).max() == pytest.approx(
        np.abs(numpy_helper.to_array(model.graph.initializer[3])).max(), rel=0.01
    )


def graph_of(*nodes: onnx.NodeProto, bias: Array) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Nodes from x (n, 5) to y (n, 7), with a weight and a bias; and rows for it."""
    draw = np.random.default_rng(4)
    constants = {"weight": draw.normal(size=(5, 7)), "bias": bias, "more": draw.normal(size=7)}
    given, gives = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", n]) for name, n in (("x", 5), ("y", 7))
    )
    parts = [numpy_helper.from_array(part.astype(np.float32), name) for name, part in constants.items()]
    graph = helper.make_graph(nodes, "graph", [given], [gives], parts)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return model, {"x": draw.normal(size=(ROWS, 5)).astype(np.float32)}


def test_a_last_operator_without_weights_stays() -> None:
    """A task may name any operator; what ends the graph need be no layer."""
    layer = helper.make_node("Gemm", ["x", "weight", "bias"], ["z"])
    for operator, more in (("Relu", []), ("Add", ["more"])):
        model, fed = graph_of(layer, helper.make_node(operator, ["z", *more], ["y"]), bias=np.arange(7))
        found, plain = (
            ask(session(one, 1), fed)["y"]
            for one in (quantize(model, [fed], ["Gemm", operator]), model.SerializeToString())
        )
        assert np.abs(found - plain).max() < 0.02 * np.abs(plain).max()


def test_a_factor_of_a_bias_is_kept() -> None:
    """By a layer that stays as it is, beside one of whole numbers."""
    layers = [
        helper.make_node("Gemm", ["x", "weight", "bias"], ["z"], beta=3.0),
        helper.make_node("MatMul", ["x", "weight"], ["w"]),
        helper.make_node("Add", ["z", "w"], ["y"]),
    ]
    model, fed = graph_of(*layers, bias=np.arange(7))
    quantized = quantize(model, [fed], ["Gemm", "MatMul"])
    found, plain = (ask(session(one, 1), fed)["y"] for one in (quantized, model.SerializeToString()))
    assert 0 < np.abs(found - plain).max() < 0.02 * np.abs(plain).max()


@pytest.mark.parametrize("missing", [0, np.nan])
def test_a_layer_that_the_quantizer_does_not_know_is_said(missing: float) -> None:
    model, fed = graph_of(helper.make_node("Gemm", ["x", "weight", "bias"], ["y"]), bias=np.ones((1, 7)))
    fed["x"][0, 0] = missing
    with pytest.raises(ConfigurationError, match=r"quantizer fails with .*; expected .*one bias per output"):
        quantize(model, [fed], ["Gemm"])


def test_a_layer_that_the_quantizer_does_not_know_is_not_told_of_its_bias() -> None:
    """Where its bias is as it should be."""
    model, fed = graph_of(
        helper.make_node("Gemm", ["x", "weight", "bias"], ["z"]), helper.make_node("Relu", ["z"], ["y"]),
        bias=np.ones(7),
    )  # fmt: skip
    model.graph.node[1].op_type = "Unheard"
    with pytest.raises(ConfigurationError, match=r"quantizer fails with .*Leave operators .* out of `quantized`"):
        quantize(model, [fed], ["Gemm"])


def test_calibration_rows_that_are_not_finite_are_said() -> None:
    model, fed = graph_of(helper.make_node("Gemm", ["x", "weight", "bias"], ["y"]), bias=np.ones(7))
    fed["x"][:] = np.nan
    with pytest.raises(DataError, match="calibration rows: input x holds nan, and ONNX Runtime's quantizer fails with"):
        quantize(model, [fed], ["Gemm"])


def last_weights(model: onnx.ModelProto, fed: dict[str, Array], kind: str) -> Array | None:
    """Those of the layer "last" as exact floats, if it has any; its answers must be the model's, about."""
    quantized = quantize(model, [fed], [kind])
    found, plain = (ask(session(one, 1), fed)["y"] for one in (quantized, model.SerializeToString()))
    assert np.abs(found - plain).max() < 0.03 * np.abs(plain).max()
    constants = onnx.load_model_from_string(quantized).graph.initializer
    return next((numpy_helper.to_array(one) for one in constants if one.name == "last/exact/weight"), None)


def only(kind: str, fed: Array, *parameters: Array, **attributes: Any) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A graph of one layer, "last", from x to y."""
    names = ["weight", "bias"][: len(parameters)]
    node = helper.make_node(kind, ["x", *names], ["y"], name="last", **attributes)
    parts = [numpy_helper.from_array(part.astype(np.float32), one) for one, part in zip(names, parameters, strict=True)]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *fed.shape[1:]])
    graph = helper.make_graph([node], kind, [given], [helper.make_empty_tensor_value_info("y")], parts)
    graph.output[0].CopyFrom(onnx.ValueInfoProto(name="y", type=helper.make_tensor_type_proto(TensorProto.FLOAT, None)))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model), {"x": fed.astype(np.float32)}


@pytest.mark.parametrize(("groups", "sizes"), [(1, (4, 6)), (2, (4, 3)), (6, (6, 1))])
def test_a_transposed_convolution_in_groups_stays(groups: int, sizes: tuple[int, int]) -> None:
    draw = np.random.default_rng(2)
    fed = draw.normal(size=(20, sizes[0], 5, 5))
    parameters = draw.normal(size=(*sizes, 3, 3)), draw.normal(size=6)
    # Of three outputs in a group and a bias the quantizer makes nothing.
    model = only("ConvTranspose", fed, *parameters[: 1 + (groups != 2)], group=groups)
    weights = last_weights(*model, "ConvTranspose")
    assert (None if weights is None else weights.shape) == ((4, 6, 3, 3) if groups == 1 else None)


@pytest.mark.parametrize(("alpha", "exact"), [(1.0, True), (3.0, False), (0.5, False)])
def test_a_factor_of_a_product_is_kept(alpha: float, *, exact: bool) -> None:
    draw = np.random.default_rng(3)
    model = only("Gemm", draw.normal(size=(ROWS, 6)), draw.normal(size=(6, 4)), 5 * draw.normal(size=4), alpha=alpha)
    assert (last_weights(*model, "Gemm") is not None) == exact


def test_a_product_with_one_vector_stays() -> None:
    draw = np.random.default_rng(4)
    assert last_weights(*only("MatMul", draw.normal(size=(ROWS, 6)), draw.normal(size=6)), "MatMul") is None


@pytest.mark.parametrize(
    ("least", "inputs", "exact"),
    [(0, 65_000, True), (0, 66_000, False), (0, 140_000, False), (-1, 120_000, True), (-1, 140_000, False)],
)
def test_a_layer_with_more_inputs_than_a_float_counts_stays(least: float, inputs: int, *, exact: bool) -> None:
    draw = np.random.default_rng(5)
    model, fed = only("Gemm", draw.uniform(least, 1, (4, inputs)), draw.normal(size=(inputs, 2)), draw.normal(size=2))
    constants = onnx.load_model_from_string(quantize(model, [fed], ["Gemm"])).graph.initializer
    assert any(one.name == "last/exact/weight" for one in constants) == exact


@pytest.mark.parametrize(("kind", "constant", "written"), [
    ("Relu", False, "Sum"), ("Relu", True, "Add"), ("Gemm", False, "Add"),
])  # fmt: skip
def test_a_sum_stays_one_of_floats(kind: str, constant: bool, written: str) -> None:
    given, gives = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("x", "y"))
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    first = helper.make_node(kind, ["x", "w"] if kind == "Gemm" else ["x"], ["a"])
    nodes = [first, helper.make_node("Add", ["a", "w" if constant else "x"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "sum", [given], [gives], [weight]),
                              opset_imports=[helper.make_opsetid("", 20)], ir_version=10)  # fmt: skip
    assert [node.op_type for node in in_primitives(model)] == [kind, written]


def residual(draw: np.random.Generator) -> onnx.ModelProto:
    """Two blocks of two convolutions: one adds its input to the result, one multiplies them. Then a sigmoid."""
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def layer(given: str, outputs: int, inputs: int) -> str:
        name = f"layer_{len(constants) // 2}"
        parameters = draw.normal(size=(outputs, inputs, 3, 3)) / math.sqrt(9 * inputs), draw.normal(size=outputs) / 4
        for part, value in zip(("weight", "bias"), parameters, strict=True):
            constants.append(numpy_helper.from_array(value.astype(np.float32), f"{name}/{part}"))
        nodes.append(
            helper.make_node("Conv", [given, f"{name}/weight", f"{name}/bias"], [name], name=name, pads=[1] * 4)
        )
        return name

    def node(kind: str, *given: str) -> str:
        name = f"{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, given, [name], name=name))
        return name

    value = node("Relu", layer("x", 8, 3))
    for kind in ("Add", "Mul"):
        value = node(kind, value, layer(node("Relu", layer(value, 8, 8)), 8, 8))
    value = node("Relu", value)  # The runtime makes one operation of it and the sum.
    nodes.append(helper.make_node("Sigmoid", [layer(value, 3, 8)], ["y"], name="y"))
    given, gives = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, "height", "width"]) for name in ("x", "y")
    )
    graph = helper.make_graph(nodes, "residual", [given], [gives], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_a_browser_answers_images_in_int8_to_the_bit(exported: ExportReport, tmp_path: Path) -> None:
    """Every layer is one of whole numbers, those whose input another takes, too. Sums are sums of floats."""
    draw = np.random.default_rng(9)
    model = residual(draw)
    fed = {"x": draw.normal(size=(4, 3, 64, 64)).astype(np.float32)}
    quantized = quantize(model, [fed], ["Conv"])
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # It warns that the file is of this machine.
    ort.InferenceSession(quantized, options)
    optimized = onnx.load(tmp_path / "optimized.onnx").graph
    kinds = Counter(node.op_type for node in optimized.node)
    assert {kind: kinds[kind] for kind in ("QLinearConv", "Conv", "Sum", "QLinearMul", "QLinearAdd")} == {
        "QLinearConv": 5, "Conv": 1, "Sum": 1, "QLinearMul": 1, "QLinearAdd": 0,
    }  # fmt: skip
    constants = {constant.name: numpy_helper.to_array(constant) for constant in optimized.initializer}
    (product,) = (node for node in optimized.node if node.op_type == "QLinearMul")
    # With other steps, a browser rounds one in some millions of products otherwise, so not in every run of this test.
    assert [math.frexp(constants[product.input[place]])[0] for place in (1, 4, 6)] == [0.5] * 3
    variant = read_package(exported.path).variant("int8")
    tensors = [tuple(map(tensor_info, of)) for of in (model.graph.input, model.graph.output)]
    manifest = msgspec.structs.replace(read_package(exported.path), tensors=tensors[0], outputs=tensors[1])
    cases = [GoldenCase({"x": TensorBytes.of(fed["x"])}, {})]
    served = ort_format(quantized)
    (tmp_path / variant.file).write_bytes(served)
    files = PackageFiles(tmp_path, "", {variant.file: hashlib.sha256(served).hexdigest()}, {})
    ours = ask(session(quantized, 1), fed)["y"]
    (theirs,) = WebRuntime().ask(Package(files, manifest), variant, cases)
    assert len(np.unique(ours)) > 1000
    np.testing.assert_array_equal(theirs["y"].view(np.int32), ours.view(np.int32))


def test_a_browser_answers_int8_to_the_bit(exported: ExportReport, table: pa.Table) -> None:
    """Rows of the training set, and others drawn column by column."""
    draw, task = np.random.default_rng(3), create_task(material(table))
    fed = task.feeds(np.arange(table.num_rows))
    drawn = {name: draw.permuted(np.concatenate([array, array]), axis=0) for name, array in fed.items()}
    drawn["numeric"] *= draw.normal(1, 2, drawn["numeric"].shape).astype(np.float32)
    package = open_package(exported.path)
    cases = [GoldenCase({name: TensorBytes.of(of[name]) for name in of}, {}) for of in (fed, drawn)]
    variant = package.manifest.variant("int8")
    opened = session(package.files.read(variant.file), 1)
    for of, theirs in zip((fed, drawn), WebRuntime().ask(package, variant, cases), strict=True):
        ours = ask(opened, of)["probability"]
        assert len(np.unique(ours)) > 1000
        np.testing.assert_array_equal(theirs["probability"].view(np.int32), ours.view(np.int32))
