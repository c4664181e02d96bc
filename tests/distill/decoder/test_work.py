"""The work of decoding by a model's sizes is that of its graph, counted node by node; and what probes make of it."""

import math
from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.decoder.probes import Probes, Speed, products
from isthmus.distill.decoder.weights import in_precision
from isthmus.distill.decoder.work import Sizes, matrix_bytes
from isthmus.distill.language.decoding import PRECISIONS, Precision
from isthmus.distill.onnx.runtime import optimized
from isthmus.features.errors import ConfigurationError
from isthmus.package.generation.prompt import PAST, TOKENS
from tests.distill.decoder.support import tiny

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Identity", "Shape")
_PRODUCTS = {"Gemm": 1, "MatMulNBits": 1, "FusedMatMul": 1, "MatMul": 1}


def counted(model: bytes, tokens: int, past: int) -> tuple[int, int, int, int]:
    """Bytes of the matrices, operations, floats that operators write, and operators, of a call of a graph."""
    graph = optimized(onnx.load_from_string(model))
    constants = {each.name: each for each in graph.initializer}
    named = [name for node in graph.node for name in node.output if name and name not in {o.name for o in graph.output}]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in named)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in (("", 20), ("com.microsoft", 1))]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    whole = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    opened = ort.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shape = [size.dim_value for size in graph.input[1].type.tensor_type.shape.dim][2:]
    feeds = {TOKENS: np.ones((1, tokens), np.int64), PAST: np.zeros((1, past, *shape), np.float32)}
    names = [output.name for output in opened.get_outputs()]
    values = {**feeds, **dict(zip(names, opened.run(names, feeds), strict=True))}
    read = flops = written = 0
    for node in graph.node:
        outputs = [values[name] for name in node.output if name in values]
        if node.op_type not in _VIEWS:
            written += sum(value.size for value in outputs if value.dtype == np.float32)
        if node.op_type in _PRODUCTS:
            matrices = [constants[name] for name in node.input[1:] if name in constants]
            read += sum(onnx.numpy_helper.to_array(each).nbytes for each in matrices)
            # What a product sums over: of attention, the heads' width or all tokens.
            left = values[node.input[0]].shape
            flops += 2 * outputs[0].size * left[-1]
    return read, flops, written, len(graph.node)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@given(
    heads=st.sampled_from([2, 4]), groups=st.sampled_from([1, 2]), head=st.sampled_from([8, 16]),
    width=st.sampled_from([32, 64, 96]), inner=st.sampled_from([64, 96]), layers=st.integers(2, 3),
    tied=st.booleans(), tokens=st.integers(2, 9), past=st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=6, deadline=None)
def test_the_work_is_that_of_the_graph(
    precision: Precision, heads: int, groups: int, head: int, width: int, inner: int, layers: int, tied: bool,
    tokens: int, past: int,
) -> None:  # fmt: skip
    model = tiny(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, head_dim=head,
        num_key_value_heads=heads // groups, tie_word_embeddings=tied,
    )  # fmt: skip
    sizes = Sizes.of(model.config.to_dict(), "the model")
    read, flops, written, nodes = counted(in_precision(CachedModel(model), precision), tokens, past)
    assert sizes.layer_bytes(precision) + sizes.head_bytes(precision) == read
    assert sizes.flops(tokens, past) == flops
    assert sizes.numbers(tokens, past) == written
    assert sizes.nodes == nodes
    cache = np.zeros((past, 2 * layers, heads // groups, head), np.float32)
    assert sizes.cache_bytes(past) == cache.nbytes
    assert sizes.bytes(precision, past) == read + cache.nbytes


def test_a_model_of_another_architecture_does_not_decode() -> None:
    with pytest.raises(ConfigurationError, match="model_type: is gpt2"):
        Sizes.of({"model_type": "gpt2"}, "student of writer")


def test_the_bytes_of_a_token_of_smollm2_by_hand() -> None:
    sizes = Sizes(49152, 576, 30, 9, 3, 64, 1536, tied=True)
    matrices = 30 * (576 * 960 + 576 * 576 + 576 * 3072 + 1536 * 576) + 576 * 49152
    assert sizes.layer_bytes("fp32") + sizes.head_bytes("fp32") == 4 * matrices
    # A block of 32 numbers has a scale, and a zero point of four bits.
    assert math.isclose(sizes.layer_bytes("int4") + sizes.head_bytes("int4"), matrices * (4 + 1 + 1 / 8) / 8)
    assert sizes.cache_bytes(1) == 46_080


SIZES = Sizes(640, 64, 2, 4, 2, 16, 128, tied=True)


def test_a_call_takes_what_its_parts_take() -> None:
    speed = Speed(SIZES, "int4", byte=1e-9, operation=2e-10, head=3e-6, launch=8e-6, node=4e-7, number=5e-9,
                  prompt_number=6e-9, reading=7e-6)  # fmt: skip
    step, part = speed.call(1, 9), speed.call(256, 3)
    assert math.isclose(step.products, 1e-9 * SIZES.layer_bytes("int4") + 3e-6)
    # All operators but the four products of each layer and the last one.
    assert math.isclose(step.overhead, 8e-6 + 4e-7 * (SIZES.nodes - 9) + 5e-9 * SIZES.numbers(1, 9))
    assert math.isclose(part.products, 2e-10 * 2 * 256 * SIZES.matrices + 3e-6)
    assert math.isclose(part.overhead, 8e-6 + 4e-7 * (SIZES.nodes - 9) + 6e-9 * SIZES.numbers(256, 3))
    assert step.seconds == step.products + step.overhead
    whole, last = speed.prompt(300), speed.call(44, 256)
    assert math.isclose(whole.seconds, speed.call(256, 0).seconds + last.seconds + 2 * 7e-6)


def ticking(spent: Sequence[float]) -> Iterator[float]:
    """A clock by which calls take these seconds, in turn."""
    now = 0.0
    for seconds in cycle(spent):
        yield now
        now += seconds
        yield now


@pytest.mark.parametrize("precision", PRECISIONS)
def test_probes_divide_seconds_by_work(precision: Precision) -> None:
    # The layers, the head, a decoder alone, the layers again, that decoder behind a text, nothing.
    clock = ticking([9, 5, 3, 9, 4, 1])
    speed = Probes(SIZES, precision, 1, 8, clock=lambda: next(clock)).speed()
    link = matrix_bytes(64, 256, precision) + matrix_bytes(256, 64, precision)
    assert math.isclose(speed.byte, (9 - 1) / (round(SIZES.layer_bytes(precision) / link) * link))
    assert (speed.head, speed.launch) == (5 - 1, 1)
    small = Sizes(64, 16, 4, 4, 2, 16, 32, tied=True)
    first, behind = small.numbers(1, 1), small.numbers(1, 9)
    assert math.isclose(speed.number, (4 - 3) / (behind - first))
    assert math.isclose(speed.node, (3 - 1 - speed.number * first) / small.nodes)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_probe_multiplies_as_a_decoder_does(precision: Precision) -> None:
    kind = "Gemm" if precision == "fp32" else "MatMulNBits"
    decoder = onnx.load_from_string(in_precision(CachedModel(tiny()), precision))
    probe = products([(64, 256), (256, 64)], precision)
    found = []
    for model in (decoder, probe):
        constants = {each.name: each for each in model.graph.initializer}
        node = next(
            each for each in model.graph.node if each.op_type == kind and constants[each.input[1]].dims[0] == 256
        )
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        matrices = [constants[name] for name in node.input[1:]]
        found.append((attributes, [(each.data_type, math.prod(each.dims)) for each in matrices]))
    assert found[0] == found[1]
    # No number of a long chain becomes denormal or infinite.
    chain = ort.InferenceSession(products([(64, 256), (256, 64)] * 40, precision).SerializeToString())
    (values,) = chain.run(None, {"x0": np.random.default_rng(0).standard_normal((1, 64), np.float32)})
    assert 1e-20 < np.abs(values).max() < 1e20
