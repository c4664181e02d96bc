from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from isthmus.distill.onnx.quantize import OUTLIERS, compress_weights, quantize, quantize_mixed
from isthmus.distill.onnx.runtime import ask, oldest_runtime, ort_format, session
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError
from isthmus.package.inputs import Feeds

OPERATORS = ("Conv", "Gather", "Gemm", "MatMul")
DRAW = np.random.default_rng(4)
WEIGHTS: dict[str, Array] = {
    "table": DRAW.normal(size=(300, 64)),
    "up": DRAW.normal(size=(64, 96)) / 8,
    "tied": DRAW.normal(size=(96, 96)) / 10,
    "heads": DRAW.normal(size=(1, 96, 64)) / 10,
    "out": DRAW.normal(size=(80, 64)) / 8,
    "halved": DRAW.normal(size=(80, 80)) / 8,
    "filter": DRAW.normal(size=(64, 80, 1)) / 8,
    "small": DRAW.normal(size=(64, 3)),
    "bias": DRAW.normal(size=80),
    "shift": DRAW.normal(size=64),
}
AXES = {"table": 0, "up": 1, "tied": 1, "heads": 2, "out": 0, "filter": 0}
"""The axis of each compressed weight that has one step per entry."""


def model(**changes: Array) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["embedded"]),
        helper.make_node("MatMul", ["embedded", "up"], ["a"]),
        helper.make_node("MatMul", ["a", "tied"], ["b"]),
        helper.make_node("Tanh", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "tied"], ["d"]),
        helper.make_node("MatMul", ["d", "heads"], ["e"]),
        helper.make_node("ReduceMean", ["e", "axis"], ["f"], keepdims=0),
        helper.make_node("Gemm", ["f", "out", "bias"], ["g"], transB=1, alpha=0.5),
        helper.make_node("Gemm", ["g", "halved", "bias"], ["h"], transB=1, beta=0.5),
        helper.make_node("Unsqueeze", ["h", "last"], ["i"]),
        helper.make_node("Conv", ["i", "filter", "shift"], ["j"]),
        helper.make_node("Squeeze", ["j", "last"], ["k"]),
        helper.make_node("MatMul", ["k", "small"], ["y"]),
    ]
    constants = {name: value.astype(np.float32) for name, value in (WEIGHTS | changes).items()}
    constants |= {"axis": np.array([1]), "last": np.array([2])}
    graph = helper.make_graph(
        nodes,
        "text",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "P"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def eight_bits(weights: Array, axis: int) -> Array:
    """The oracle: round weights to multiples of 1/127 of the largest, per entry of an axis."""
    rounded = []
    for part in np.moveaxis(weights.astype(np.float32), axis, 0):
        step = np.abs(part).max() / np.float32(127)
        rounded.append(np.rint(part / step) * step if step > 0 else part)
    return np.moveaxis(np.array(rounded), 0, axis)


def answers(content: bytes, feeds: Feeds) -> Array:
    return ask(session(content, 1), feeds)["y"]


FEEDS: Feeds = {"ids": DRAW.integers(0, 300, (7, 5))}
ORACLES: dict[str, Callable[[str], Array]] = {
    "w8": lambda name: eight_bits(WEIGHTS[name], AXES[name]),
    "fp16": lambda name: WEIGHTS[name].astype(np.float16),
}


@pytest.mark.parametrize("precision", ORACLES)
def test_compressed_weights_answer_as_rounded_weights_in_float32(precision: str) -> None:
    rounded = model(**{name: ORACLES[precision](name) for name in AXES})
    expected, compressed = answers(rounded.SerializeToString(), FEEDS), compress_weights(model(), precision, OPERATORS)
    onnx.checker.check_model(onnx.load_model_from_string(compressed), full_check=True)
    assert np.abs(answers(compressed, FEEDS) - answers(model().SerializeToString(), FEEDS)).max() > 1e-4
    packed = ort_format(compressed, compressed=True)
    for content in (compressed, packed):
        np.testing.assert_allclose(answers(content, FEEDS), expected, atol=2e-5, rtol=0)
        alone = [answers(content, {"ids": FEEDS["ids"][row : row + 1]})[0] for row in range(7)]
        np.testing.assert_allclose(alone, expected, atol=2e-5, rtol=0)
    assert oldest_runtime(compressed) == "1.19"


@pytest.mark.parametrize(("precision", "share"), [("w8", 0.35), ("fp16", 0.6)])
def test_an_ort_file_does_not_store_compressed_weights_as_floats(precision: str, share: float) -> None:
    compressed, whole = compress_weights(model(), precision, ("Gather", "MatMul", "Gemm")), model().SerializeToString()
    packed = ort_format(compressed, compressed=True)
    # `halved` and `filter` stay in float32.
    fixed = 4 * (WEIGHTS["halved"].size + WEIGHTS["filter"].size)
    assert len(packed) - fixed < share * (len(whole) - fixed)
    assert len(packed) < 1.2 * len(compressed)
    assert len(ort_format(compressed)) > len(packed)
    again = compress_weights(model(), precision, ("Gather", "MatMul", "Gemm"))
    assert (again, ort_format(again, compressed=True)) == (compressed, packed)


@pytest.mark.parametrize("axes", [[0], [1], [-2]])
def test_a_table_of_positions_is_compressed_if_whole_rows_are_read(axes: list[int]) -> None:
    nodes = [
        helper.make_node("Shape", ["ids"], ["count"], start=1, end=2),
        helper.make_node("Slice", ["table", "zero", "count", "axes"], ["first"]),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("ReduceMean", ["first"], ["mean"], keepdims=0),
        helper.make_node("Add", ["rows", "mean"], ["y"]),
    ]
    constants = {"table": WEIGHTS["table"].astype(np.float32), "zero": np.array([0]), "axes": np.array(axes)}

    def content(table: Array) -> bytes:
        graph = helper.make_graph(
            nodes, "positions", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "P"])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "P", 64])],
            [numpy_helper.from_array(value, name) for name, value in {**constants, "table": table}.items()],
        )  # fmt: skip
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return bytes(made.SerializeToString())

    whole = content(constants["table"])
    compressed = compress_weights(onnx.load_model_from_string(whole), "w8", ("Gather",))
    if axes != [0]:
        assert "table" in {tensor.name for tensor in onnx.load_model_from_string(compressed).graph.initializer}
        return
    assert len(compressed) < 0.35 * len(whole)
    assert len(ort_format(compressed, compressed=True)) < 0.45 * len(whole)
    expected = answers(content(eight_bits(WEIGHTS["table"], 0).astype(np.float32)), FEEDS)
    np.testing.assert_allclose(answers(compressed, FEEDS), expected, atol=2e-6)


def test_only_declared_operators_are_compressed() -> None:
    whole = model().SerializeToString(deterministic=True)
    assert compress_weights(model(), "w8", ()) == whole
    kept = onnx.load_model_from_string(compress_weights(model(), "w8", ("Gemm",))).graph.initializer
    assert {"table", "up", "tied", "filter", "halved"} < {tensor.name for tensor in kept}
    assert "out" not in {tensor.name for tensor in kept}


def test_weights_that_do_not_fit_stay_in_float32() -> None:
    def kept(precision: str, **changes: Array) -> set[str]:
        compressed = onnx.load_model_from_string(compress_weights(model(**changes), precision, OPERATORS))
        return {tensor.name for tensor in compressed.graph.initializer}

    large = WEIGHTS["up"].copy()
    large[0, 0] = 1e5
    assert "up" in kept("fp16", up=large)
    assert "up" not in kept("w8", up=large)
    infinite = WEIGHTS["table"].copy()
    infinite[3, 3] = np.inf
    for precision in ORACLES:
        assert "table" in kept(precision, table=infinite)


def test_weights_of_zeros_are_compressed() -> None:
    zeros = model(up=np.zeros_like(WEIGHTS["up"]))
    found = answers(compress_weights(zeros, "w8", OPERATORS), FEEDS)
    np.testing.assert_allclose(found, answers(zeros.SerializeToString(), FEEDS), rtol=0.01)


def test_a_weight_that_a_branch_reads_too_is_kept() -> None:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["up"], ["seen"])], "branch", [],
        [helper.make_tensor_value_info("seen", TensorProto.FLOAT, [64, 96])],
    )  # fmt: skip
    source = model()
    source.graph.node.append(helper.make_node("If", ["yes"], ["z"], then_branch=branch, else_branch=branch))
    source.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    source.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [64, 96]))
    outputs = ask(session(compress_weights(source, "w8", OPERATORS), 1), FEEDS)
    np.testing.assert_array_equal(outputs["z"], WEIGHTS["up"].astype(np.float32))


LAYERS, SPIKED = 13, (4, 9, 11)


def deep() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Thirteen layers and their weights; one input of each layer in `SPIKED` is at times larger than all others."""
    draw = np.random.default_rng(9)
    weights = {f"w{layer}": (draw.normal(size=(72, 72)) / 6).astype(np.float32) for layer in range(LAYERS)}
    constants = {**weights, "nine": np.array(9, np.float32)}
    constants |= {f"spike{layer}": np.eye(1, 72, dtype=np.float32)[0] * size
                  for layer, size in zip(SPIKED, (50, 400, 200), strict=True)}  # fmt: skip
    nodes = []
    for layer in range(LAYERS):
        fed = f"x{layer}"
        if layer in SPIKED:
            nodes += [
                helper.make_node("Pow", [fed, "nine"], [f"power{layer}"]),
                helper.make_node("Mul", [f"power{layer}", f"spike{layer}"], [f"unit{layer}"]),
                helper.make_node("Add", [fed, f"unit{layer}"], [f"spiked{layer}"]),
            ]
            fed = f"spiked{layer}"
        nodes.append(helper.make_node("MatMul", [fed, f"w{layer}"], [f"y{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"y{layer}"], [f"x{layer + 1}"]))
    nodes[-1].output[0] = "y"
    graph = helper.make_graph(
        nodes, "deep", [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["N", 72])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 72])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), weights


def widths(weights: dict[str, Array], x: Array) -> list[float]:
    """The oracle: the range of each layer's inputs, with 0, over their root mean square."""
    found = []
    for layer in range(LAYERS):
        if layer in SPIKED:
            x = x + np.eye(1, 72) * dict(zip(SPIKED, (50, 400, 200), strict=True))[layer] * x**9
        found.append((max(x.max(), 0) - min(x.min(), 0)) / np.sqrt((x**2).mean()))
        x = np.tanh(x @ weights[f"w{layer}"])
    return found


ROWS = DRAW.normal(size=(300, 72)).astype(np.float32)
CALIBRATION = [{"x0": ROWS[:100]}, {"x0": ROWS[100:]}, {"x0": ROWS[:0]}]


def test_layers_with_the_worst_outliers_only_get_smaller_weights() -> None:
    source, weights = deep()
    measured = widths(weights, ROWS)
    # Two of thirteen layers may be spared, and the last; the inputs of one more have outliers.
    worst = sorted(range(LAYERS), key=lambda layer: -measured[layer])
    assert {*worst[:3]} == {*SPIKED}
    assert measured[worst[2]] > OUTLIERS > measured[worst[3]]
    mixed = quantize_mixed(source, CALIBRATION, OPERATORS)
    nodes = {tensor: node for node in onnx.load_model_from_string(mixed).graph.node for tensor in node.input}
    assert {name for name in weights if f"{name}/1/whole" in nodes} == {f"w{n}" for n in (*worst[:2], LAYERS - 1)}
    assert quantize_mixed(source, CALIBRATION, OPERATORS) == mixed


def test_mixed_precision_is_closer_than_int8_and_nearly_as_small() -> None:
    source, _ = deep()
    feeds = {"x0": DRAW.normal(size=(40, 72)).astype(np.float32)}
    mixed, whole = quantize_mixed(source, CALIBRATION, OPERATORS), source.SerializeToString()
    expected = answers(whole, feeds)
    files = {"int8": quantize(source, CALIBRATION[:2], OPERATORS), "mixed": mixed}
    far = {name: np.abs(answers(content, feeds) - expected).mean() for name, content in files.items()}
    assert 0 < far["mixed"] < 0.7 * far["int8"]
    packed = ort_format(mixed, compressed=True)
    assert len(packed) < 0.4 * len(ort_format(whole))
    np.testing.assert_allclose(answers(packed, feeds), answers(mixed, feeds), atol=far["int8"])
    alone = [answers(packed, {"x0": feeds["x0"][row : row + 1]})[0] for row in range(40)]
    np.testing.assert_allclose(alone, answers(packed, feeds), atol=1e-5)


def test_a_graph_of_tables_alone_has_nothing_to_mix() -> None:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"])], "table",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 64])],
        [numpy_helper.from_array(WEIGHTS["table"].astype(np.float32), "table")],
    )  # fmt: skip
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    assert quantize_mixed(source, [], ("Gather",)) == quantize(source, [], ("Gather",))
    with pytest.raises(ConfigurationError, match="an operator that the student's graph has"):
        quantize_mixed(source, [], ("Conv",))
