"""Predict how fast this host decodes with a model of given sizes, by timing small ONNX Runtime models."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

from isthmus.distill.decoder.graph import graph
from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.decoder.weights import ACCURACY, BITS, BLOCK
from isthmus.distill.decoder.work import Sizes, matrix_bytes
from isthmus.distill.language.decoding import Precision
from isthmus.features.errors import extra
from isthmus.package.generation.decoder import PART, Decoder
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation
from isthmus.package.replay import session_options
from isthmus.transforms.rowwise.core.graph import IR_VERSION, OPSET

_WEIGHTS = 1 << 27
"""Most bytes of a chain of products: more than fits in CPU caches."""
_FLOPS = 4e9
"""Operations of a chain that reads a prompt. Short chains suffice: prompts are limited by arithmetic, not memory."""
_LAYERS = 4
"""Layers of the decoder with almost no weights."""
_SECONDS, _FEWEST, _MOST = 0.3, 5, 100
"""Seconds for which a probe repeats its calls, and the minimum and maximum number of calls."""


@dataclass(frozen=True)
class Estimate:
    """The expected seconds of one decoder call: for matrix products, and for launching operators (overhead)."""

    products: float
    overhead: float

    @property
    def seconds(self) -> float:
        return self.products + self.overhead


@dataclass(frozen=True)
class Speed:
    """Measured costs of the parts of a decoder call, in seconds.

    `byte` is per byte of layer weights for one token. `operation` is per operation of the layers' products for a
    prompt. `head` is for the output layer, `launch` for a call that does nothing, and `node` per operator. `number` and
    `prompt_number` are per number that an operator writes, in a decoding step and in a prompt. `reading` is for the
    outputs: find the likeliest token and extend the cache.
    """

    sizes: Sizes
    precision: Precision
    byte: float
    operation: float
    head: float
    launch: float
    node: float
    number: float
    prompt_number: float
    reading: float

    def call(self, tokens: int, past: int) -> Estimate:
        sizes = self.sizes
        if tokens == 1:
            layers, number = self.byte * sizes.layer_bytes(self.precision), self.number
        else:
            layers, number = self.operation * 2 * tokens * sizes.matrices, self.prompt_number
        launched = sizes.nodes - len(sizes.products) * sizes.layers - 1
        overhead = self.launch + self.node * launched + number * sizes.numbers(tokens, past)
        return Estimate(layers + self.head, overhead)

    def prompt(self, tokens: int) -> Estimate:
        calls = [self.call(min(PART, tokens - past), past) for past in range(0, tokens, PART)]
        products, overhead = (sum(getattr(call, part) for call in calls) for part in ("products", "overhead"))
        return Estimate(products, overhead + self.reading * len(calls))


@dataclass(frozen=True)
class _Products:
    matrices: Sequence[tuple[int, int]]
    call: Callable[[], object]


class Probes:
    """Measure what the calls of a decoder cost on this host, with small ONNX Runtime models (probes) in its place.

    Used to predict tokens per second from the decoder's sizes alone. Creating an instance builds the probes. `prompt`
    is the number of tokens of a prompt, and of the text before a decoding step. `clock` returns seconds. By default it
    is thread CPU time on one thread, which other processes do not affect, and wall time on several.
    """

    def __init__(
        self, sizes: Sizes, precision: Precision, threads: int, prompt: int, clock: Callable[[], float] | None = None
    ) -> None:
        self._sizes, self._precision, self._threads, self._past = sizes, precision, threads, prompt
        self._clock = clock or (time.thread_time if threads == 1 else time.perf_counter)
        self._tokens = max(2, min(prompt, PART))
        link = [(sizes.width, 2 * sizes.inner), (2 * sizes.inner, sizes.width)]
        each = sum(matrix_bytes(*matrix, precision) for matrix in link)
        links = max(1, round(min(_WEIGHTS, sizes.layer_bytes(precision)) / each))
        few = max(1, min(links, round(_FLOPS / (8 * self._tokens * sizes.width * sizes.inner))))
        self._step, self._head = self._products(link * links, 1), self._products([(sizes.width, sizes.vocabulary)], 1)
        self._prompt, self._nothing = self._products(link * few, self._tokens), self._products([(BLOCK, BLOCK)], 1)
        # transformers requires a width that is a multiple of the heads.
        self._small = Sizes(64, 4 * sizes.heads, _LAYERS, sizes.heads, sizes.shared, sizes.head, 32, tied=True)
        self._decoder = self._session(graph(_decoder(self._small, prompt + self._tokens + 1)))

    def speed(self) -> Speed:
        sizes, small, precision, past = self._sizes, self._small, self._precision, self._past + 1
        alone, behind = self._call(1, 1), self._call(1, past)
        # Alternate the calls, as in the model: each evicts the weights of the others from the CPU caches.
        stepped, ended, first, _, second, launch = self._seconds(
            self._step.call, self._head.call, alone, self._step.call, behind, self._nothing.call
        )
        prompted, whole, reading = (
            self._seconds(call)[0] for call in (self._prompt.call, self._call(self._tokens, 0), self._reading())
        )
        number = max(0.0, second - first) / (small.numbers(1, past) - small.numbers(1, 1))
        launched = max(0.0, first - launch - number * small.numbers(1, 1))
        return Speed(
            sizes=sizes,
            precision=precision,
            byte=max(0.0, stepped - launch) / sum(matrix_bytes(*matrix, precision) for matrix in self._step.matrices),
            operation=max(0.0, prompted - launch)
            / sum(2 * self._tokens * takes * gives for takes, gives in self._prompt.matrices),
            head=max(0.0, ended - launch),
            launch=launch,
            node=launched / small.nodes,
            number=number,
            prompt_number=max(0.0, whole - launch - launched) / small.numbers(self._tokens, 0),
            reading=reading,
        )

    def _call(self, tokens: int, past: int) -> Callable[[], object]:
        shape = (1, past, 2 * _LAYERS, self._sizes.shared, self._sizes.head)
        feeds = {TOKENS: np.ones((1, tokens), np.int64), PAST: np.full(shape, 0.1, np.float32)}
        return lambda: self._decoder.run(None, feeds)

    def _products(self, matrices: Sequence[tuple[int, int]], rows: int) -> _Products:
        session = self._session(products(matrices, self._precision))
        feeds = {"x0": np.full((rows, matrices[0][0]), 0.1, np.float32)}
        return _Products(matrices, lambda: session.run(None, feeds))

    def _reading(self) -> Callable[[], object]:
        sizes = self._sizes
        shape = (2 * sizes.layers, sizes.shared, sizes.head)
        decoder = Decoder("probe", Generation(context=self._past + 1, most=1, end=()), "", shape)
        cache = decoder.cache()
        logits = np.random.default_rng(0).standard_normal((1, sizes.vocabulary)).astype(np.float32)
        outputs = {LOGITS: logits, NEW: np.zeros((1, 1, *shape), np.float32)}

        def call() -> None:
            cache.length = self._past
            decoder.feeds([0], cache)
            decoder.take(outputs, cache)

        return call

    def _session(self, model: onnx.ModelProto) -> ort.InferenceSession:
        options = session_options(self._threads)
        options.enable_mem_pattern = False
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def _seconds(self, *calls: Callable[[], object]) -> list[float]:
        for call in calls:
            call()
        spent: list[list[float]] = [[] for _ in calls]
        until = time.perf_counter() + _SECONDS * len(calls)
        while len(spent[0]) < _FEWEST or (len(spent[0]) < _MOST and time.perf_counter() < until):
            for call, seconds in zip(calls, spent, strict=True):
                began = self._clock()
                call()
                seconds.append(self._clock() - began)
        return [median(seconds) for seconds in spent]


def products(matrices: Sequence[tuple[int, int]], precision: Precision) -> onnx.ModelProto:
    generator, nodes, constants = np.random.default_rng(0), [], []
    for place, (takes, gives) in enumerate(matrices):
        weights = _weights(f"w{place}", takes, gives, precision, generator)
        inputs = [f"x{place}", *(each.name for each in weights)]
        nodes.append(_product(inputs, f"x{place + 1}", takes, gives, precision))
        constants += weights
    first, last = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size])
        for name, size in (("x0", matrices[0][0]), (f"x{len(matrices)}", matrices[-1][1]))
    )
    return helper.make_model(
        helper.make_graph(nodes, "products", [first], [last], constants), ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
    )  # fmt: skip


def _weights(
    name: str, takes: int, gives: int, precision: Precision, generator: np.random.Generator
) -> list[onnx.TensorProto]:
    """Return the constants of a random matrix, scaled to keep outputs as large as inputs: denormal numbers are slow."""
    scale = np.float32((12 / takes) ** 0.5)
    if precision == "fp32":
        weights = generator.random((gives, takes), np.float32) - np.float32(0.5)
        return [numpy_helper.from_array(weights * scale, name)]
    bits, blocks = BITS[precision], -(-takes // BLOCK)
    whole = generator.integers(0, 256, (gives, blocks, BLOCK * bits // 8), np.uint8)
    # Zero points in the middle of the range; with 4 bits, two per byte.
    middle = np.full(gives * -(-blocks * bits // 8), 128 if bits == 8 else 0x88, np.uint8)
    scales = np.full(gives * blocks, scale / 2**bits, np.float32)
    parts = {name: whole, f"{name}_scales": scales, f"{name}_zeros": middle}
    return [numpy_helper.from_array(value, part) for part, value in parts.items()]


def _product(inputs: Sequence[str], name: str, takes: int, gives: int, precision: Precision) -> onnx.NodeProto:
    if precision == "fp32":
        return helper.make_node("Gemm", inputs, [name], transB=1)
    return helper.make_node(
        "MatMulNBits", inputs, [name], domain="com.microsoft", K=takes, N=gives, bits=BITS[precision],
        block_size=BLOCK, accuracy_level=ACCURACY[precision],
    )  # fmt: skip


def _decoder(sizes: Sizes, context: int) -> CachedModel:
    with extra("text"):
        from transformers import LlamaConfig, LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=sizes.vocabulary, hidden_size=sizes.width, intermediate_size=sizes.inner,
            num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.shared,
            head_dim=sizes.head, max_position_embeddings=context, tie_word_embeddings=sizes.tied,
        ))  # fmt: skip
    return CachedModel(model.eval())
