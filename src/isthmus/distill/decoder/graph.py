"""The ONNX graph of a `CachedModel`, built node by node: torch.onnx.export is slow and splits fused matrix products."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import nn

from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.onnx.builder import Building
from isthmus.distill.types import Array
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS


def graph(decoder: CachedModel, *, products: bool = False) -> onnx.ModelProto:
    """Build the ONNX graph of a language model that reads new tokens after earlier tokens, whose state is in a cache.

    Inputs are `tokens`, int64 (1, tokens), and the cache `past`, float32 (1, past, 2 * layers, shared, width), where
    `shared` is the number of key and value heads. Outputs are the next token's `logits`, float32 (1, vocabulary), and
    `new`, the cache entries of `tokens`. If `products` is True, the graph multiplies with MatMul, as ONNX Runtime's
    weight quantizer requires. Otherwise it uses Gemm, which can share its weights with the embedding.
    """
    writer = _Writer(decoder, products=products)
    cache: list[str | int] = [2 * decoder.layers, decoder.shared, decoder.width]
    inputs = [
        helper.make_tensor_value_info(TOKENS, TensorProto.INT64, [1, "tokens"]),
        helper.make_tensor_value_info(PAST, TensorProto.FLOAT, [1, "past", *cache]),
    ]
    outputs = [
        helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, [1, decoder.head.out_features]),
        helper.make_tensor_value_info(NEW, TensorProto.FLOAT, [1, "tokens", *cache]),
    ]
    writer.write()
    return writer.build.model("decoder", inputs, outputs)


class _Writer:
    def __init__(self, decoder: CachedModel, *, products: bool) -> None:
        self.decoder, self.build = decoder, Building()
        self._operator = "MatMul" if products else "Gemm"
        embedding, head = decoder.body.embed_tokens.weight, decoder.head.weight
        self._tied = embedding.data_ptr() == head.data_ptr()

    def write(self) -> None:
        decoder, build = self.decoder, self.build
        cosine, sine, later = self._places()
        values = build.add(
            "Gather", [self._weights("embedding", decoder.body.embed_tokens.weight), self._row(TOKENS)], "embedded"
        )
        new: list[str] = []
        for place, layer in enumerate(decoder.body.layers):
            name = f"layer_{place}"
            inner = self._norm(f"{name}/first", values, layer.input_layernorm)
            attention = layer.self_attn
            mixed = self._attention(
                name, self._linear(f"{name}/in", inner, [attention.q_proj, attention.k_proj, attention.v_proj]),
                place, (cosine, sine, later), new,
            )  # fmt: skip
            values = build.add("Add", [values, self._linear(f"{name}/out", mixed, [attention.o_proj])], f"{name}/mixed")
            inner = self._norm(f"{name}/second", values, layer.post_attention_layernorm)
            both = self._linear(f"{name}/inner", inner, [layer.mlp.gate_proj, layer.mlp.up_proj])
            gate, up = self._split(both, [layer.mlp.gate_proj.out_features, layer.mlp.up_proj.out_features], 1)
            gate = build.add("Mul", [gate, build.add("Sigmoid", [gate], f"{name}/sigmoid")], f"{name}/silu")
            inner = build.add("Mul", [gate, up], f"{name}/gated")
            values = build.add("Add", [values, self._linear(f"{name}/down", inner, [layer.mlp.down_proj])], name)
        last = build.add("Slice", [values, *map(self._whole, (-1, 2**31 - 1, 0))], "last")
        normed = self._norm("norm", last, decoder.body.norm)
        logits = self._linear("head", normed, [decoder.head], "embedding" if self._tied else "")
        build.add("Identity", [logits], LOGITS)
        build.add("Unsqueeze", [build.add("Concat", new, "all", axis=1), self._whole(0)], NEW)

    def _places(self) -> tuple[str, str, str]:
        build, one, zero = self.build, self._number(1), self._number(0)
        count, before = (
            build.add("Squeeze", [build.add("Shape", [name], f"{name}/size", start=1, end=2)], f"{name}/count")
            for name in (TOKENS, PAST)
        )
        total = build.add("Add", [count, before], "total")
        places = build.add("Range", [before, total, one], "places")
        every = build.add("Unsqueeze", [build.add("Range", [zero, total, one], "range"), self._whole(0)], "every")
        column = build.add("Unsqueeze", [places, self._whole(1)], "column")
        turns = []
        for name, table in zip(("cosine", "sine"), self.decoder.rotations, strict=True):
            turn = build.add("Gather", [self._weights(name, table), places], f"{name}/taken")
            turns.append(build.add("Unsqueeze", [turn, self._whole(1)], f"{name}/turn"))
        return turns[0], turns[1], build.add("Greater", [every, column], "later")

    def _attention(self, name: str, projected: str, place: int, places: tuple[str, str, str], new: list[str]) -> str:
        """Return the attention output, (tokens, heads * width); append new keys and values to `new`."""
        decoder, build, (cosine, sine, later) = self.decoder, self.build, places
        heads, shared, width = decoder.heads, decoder.shared, decoder.width
        projected = build.add("Reshape", [projected, self._whole(0, -1, width)], f"{name}/heads")
        turned, value = self._split(projected, [heads + shared, shared], 1)
        first, second = self._split(turned, [width // 2] * 2, 2)
        other = build.add("Concat", [build.add("Neg", [second], f"{name}/negated"), first], f"{name}/other", axis=2)
        turned = build.add(
            "Add",
            [build.add("Mul", [turned, cosine], f"{name}/cosine"), build.add("Mul", [other, sine], f"{name}/sine")],
            f"{name}/turned",
        )
        query, key = self._split(turned, [heads, shared], 1)
        kept = []
        for offset, own in enumerate((key, value)):
            new.append(build.add("Unsqueeze", [own, self._whole(1)], f"{own}/new"))
            old = build.add("Gather", [self._row(PAST), self._number(2 * place + offset)], f"{own}/past", axis=1)
            kept.append(build.add("Concat", [old, own], f"{own}/all", axis=0))
        keys = build.add("Transpose", [kept[0]], f"{name}/keys", perm=[1, 2, 0])
        values = build.add("Transpose", [kept[1]], f"{name}/values", perm=[1, 0, 2])
        scale = build.constant("scale", np.float32(width**-0.5))
        query = build.add("Mul", [query, scale], f"{name}/scaled")
        query = build.add("Transpose", [query], f"{name}/queries", perm=[1, 0, 2])
        query = build.add("Reshape", [query, self._whole(shared, -1, width)], f"{name}/grouped")
        scores = build.add("MatMul", [query, keys], f"{name}/products")
        scores = build.add("Reshape", [scores, self._whole(heads, -1, 0)], f"{name}/scores")
        hidden = build.constant("hidden", np.float32(-np.inf))
        scores = build.add("Where", [later, hidden, scores], f"{name}/causal")
        weights = build.add("Softmax", [scores], f"{name}/weights", axis=-1)
        weights = build.add("Reshape", [weights, self._whole(shared, -1, 0)], f"{name}/shared")
        mixed = build.add("MatMul", [weights, values], f"{name}/sums")
        mixed = build.add("Reshape", [mixed, self._whole(heads, -1, width)], f"{name}/apart")
        mixed = build.add("Transpose", [mixed], f"{name}/rows", perm=[1, 0, 2])
        return build.add("Reshape", [mixed, self._whole(0, heads * width)], f"{name}/together")

    def _norm(self, name: str, values: str, norm: Any) -> str:
        build = self.build
        two = build.constant("two", np.float32(2))
        epsilon = build.constant("epsilon", np.float32(norm.variance_epsilon))
        square = build.add("Pow", [values, two], f"{name}/squares")
        mean = build.add("ReduceMean", [square, self._whole(-1)], f"{name}/mean", keepdims=1)
        root = build.add("Sqrt", [build.add("Add", [mean, epsilon], f"{name}/shifted")], f"{name}/root")
        divided = build.add("Div", [values, root], f"{name}/divided")
        return build.add("Mul", [divided, self._weights(f"{name}/weight", norm.weight)], f"{name}/normed")

    def _linear(self, name: str, values: str, layers: Sequence[nn.Linear], known: str = "") -> str:
        build = self.build
        weights = torch.cat(tuple(layer.weight for layer in layers))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = self._weights(f"{name}/bias", torch.cat(tuple(biases))) if biases else ""
        if self._operator == "Gemm":
            constant = known or self._weights(f"{name}/weight", weights)
            return build.add("Gemm", [values, constant, *([bias] if bias else [])], name, transB=1)
        product = build.add("MatMul", [values, self._weights(f"{name}/weight", weights.T)], f"{name}/product")
        return build.add("Add", [product, bias], name) if bias else product

    def _row(self, name: str) -> str:
        """Drop an input's first axis, of size 1, which runtimes that process one row at a time require."""
        return self.build.add("Squeeze", [name, self._whole(0)], f"{name}/row")

    def _split(self, tensor: str, sizes: Sequence[int], axis: int) -> list[str]:
        return self.build.split(tensor, sizes, axis)

    def _weights(self, name: str, weights: torch.Tensor) -> str:
        values: Array = weights.detach().float().contiguous().numpy()
        return self.build.constant(name, values)

    def _whole(self, *values: int) -> str:
        return self.build.constant(f"whole/{'/'.join(map(str, values))}", np.array(values, np.int64))

    def _number(self, value: int) -> str:
        return self.build.constant(f"number/{value}", np.int64(value))
