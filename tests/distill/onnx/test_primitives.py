"""Operators of floats as steps: what ONNX Runtime's own say, and that in any order of what is summed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper, numpy_helper
from scipy import special

from isthmus.distill.onnx.primitives import in_primitives
from isthmus.distill.onnx.runtime import ask, session

Array = np.ndarray[Any, Any]
WIDTH = 7
AXES = numpy_helper.from_array(np.array([-1]), "axes")
NORM = [
    numpy_helper.from_array(np.full(WIDTH, 1.5, np.float32), "scale"),
    numpy_helper.from_array(np.full(WIDTH, -0.25, np.float32), "bias"),
]


def norm(x: Array, epsilon: float) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    found: Array = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon) * 1.5
    return found


Reference = Callable[[Array], Array]
OPERATORS: dict[str, tuple[str, list[onnx.TensorProto], dict[str, Any], Reference]] = {
    "sigmoid": ("Sigmoid", [], {}, special.expit),
    "tanh": ("Tanh", [], {}, np.tanh),
    "erf": ("Erf", [], {}, special.erf),
    "gelu": ("Gelu", [], {}, lambda x: x * special.ndtr(x)),
    "gelu by tanh": (
        "Gelu", [], {"approximate": "tanh"},
        lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    ),
    "softmax": ("Softmax", [], {"axis": -1}, lambda x: special.softmax(x, -1)),
    "layer norm": ("LayerNormalization", NORM, {"epsilon": 1e-6}, lambda x: norm(x, 1e-6) - 0.25),
    "layer norm without a bias": ("LayerNormalization", NORM[:1], {}, lambda x: norm(x, 1e-5)),
    "sum": ("ReduceSum", [AXES], {}, lambda x: x.sum(-1, keepdims=True)),
    "sum, fewer dimensions": ("ReduceSum", [AXES], {"keepdims": 0}, lambda x: x.sum(-1)),
    "mean": ("ReduceMean", [AXES], {"keepdims": 0}, lambda x: x.mean(-1)),
    "norm": ("ReduceL2", [AXES], {}, lambda x: np.sqrt((x**2).sum(-1, keepdims=True))),
}  # fmt: skip
ALONG = [name for name, (_, constants, _, _) in OPERATORS.items() if constants or name == "softmax"]
ROWS = st.sampled_from([50.0, 2.0**60]).flatmap(
    lambda most: arrays(
        np.float32, st.tuples(st.integers(1, 4), st.just(WIDTH)), elements=st.floats(-most, most, width=32)
    )
)


def graphs(
    name: str, *, opset: int = 20, kind: int = TensorProto.FLOAT, constants: list[onnx.TensorProto] | None = None
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A graph of one operator, and the same in steps."""
    operator, usual, attributes, _ = OPERATORS[name]
    constants = usual if constants is None else constants
    x, y = (helper.make_tensor_value_info(tensor, kind, None) for tensor in "xy")
    node = helper.make_node(operator, ["x", *(one.name for one in constants)], ["y"], name="y", **attributes)
    graph = helper.make_graph([node], name, [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    steps = onnx.ModelProto()
    steps.CopyFrom(model)
    nodes = in_primitives(steps)
    del steps.graph.node[:]
    steps.graph.node.extend(nodes)
    return model, steps


SESSIONS = {name: session(graphs(name)[1].SerializeToString(), 1) for name in OPERATORS}


def answered(name: str, x: Array) -> Array:
    found: Array = ask(SESSIONS[name], {"x": x})["y"]
    return found


@pytest.mark.parametrize("name", OPERATORS)
@given(x=ROWS)
def test_steps_say_what_the_operator_says(name: str, x: Array) -> None:
    ours, reference = answered(name, x), OPERATORS[name][3](x.astype(np.float64))
    assert (ours.shape, ours.dtype) == (reference.shape, np.float32)
    # A share within 2e-6 is of a large number; steps of a sum are of its largest.
    size = np.abs(x).max() if name.startswith("gelu") else np.abs(x).max() * 1e-6 if name in ALONG[-4:] else 1
    np.testing.assert_allclose(ours, reference, rtol=2e-6, atol=2e-6 * max(size, 1e-30))


@pytest.mark.parametrize("name", ALONG)
@given(x=ROWS, order=st.permutations(range(WIDTH)))
def test_no_order_changes_a_bit(name: str, x: Array, order: list[int]) -> None:
    one, other = answered(name, x), answered(name, x[:, order])
    if one.shape == x.shape:
        one = one[:, order]
    np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_do_not_change_each_other(name: str) -> None:
    x = np.random.default_rng(1).normal(0, 3, (64, WIDTH)).astype(np.float32)
    alone = np.concatenate([answered(name, row[None]) for row in x])
    np.testing.assert_array_equal(answered(name, x).view(np.int32), alone.view(np.int32))


def test_what_was_masked_has_no_weight() -> None:
    x = np.array([[1, 2, 3, -np.inf, -np.inf, -17, 0]], np.float32)
    assert answered("softmax", x)[0, 3:6].tolist() == [0, 0, 0]
    assert np.isnan(answered("softmax", np.full((1, WIDTH), -np.inf, np.float32))).all()


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_no_number_gives_none(name: str) -> None:
    x = np.ones((2, WIDTH), np.float32)
    x[0, 3] = np.nan
    found = answered(name, x)
    assert np.isnan(found[0, 3] if name not in ALONG else found[0]).all()
    assert np.isfinite(found[1]).all()


@pytest.mark.parametrize(
    ("name", "told"),
    [("sum", {"kind": TensorProto.INT64}), ("mean", {"kind": TensorProto.DOUBLE}), ("softmax", {"opset": 17})],
)
def test_what_it_does_not_know_stays(name: str, told: dict[str, Any]) -> None:
    model, steps = graphs(name, **told)
    assert [*steps.graph.node] == [*model.graph.node]


@pytest.mark.parametrize("shape", [(), (1,), (1, WIDTH), (4, WIDTH), (4, 1)])
def test_a_scale_that_has_not_a_number_per_column_stays(shape: tuple[int, ...]) -> None:
    model, steps = graphs("layer norm", constants=[numpy_helper.from_array(np.ones(shape, np.float32), "scale")])
    assert [*steps.graph.node] == [*model.graph.node]
