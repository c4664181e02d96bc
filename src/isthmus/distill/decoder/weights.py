"""Quantize the weights of a decoder in blocks of 32 numbers, so that a call reads fewer bytes from memory."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx
from onnx import helper, numpy_helper

from isthmus.distill.decoder.graph import graph
from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.language.decoding import Precision
from isthmus.distill.types import Array
from isthmus.package.generation.prompt import TOKENS

BLOCK = 32
BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
ACCURACY = {"int8": 4, "int4": None}
"""ONNX Runtime's accuracy level. Level 4 rounds activations to 8 bits per block; onnxruntime-web does not, so the two
differ. Without it, 8-bit weights are ten times slower than floats."""
_TABLE_BITS = 4


def in_precision(decoder: CachedModel, precision: Precision) -> bytes:
    if precision == "fp32":
        return bytes(graph(decoder).SerializeToString(deterministic=True))
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    with _quiet():
        quantizer = MatMulNBitsQuantizer(
            graph(decoder, products=True), bits=BITS[precision], block_size=BLOCK, is_symmetric=False,
            accuracy_level=ACCURACY[precision], op_types_to_quantize=("MatMul",),
        )  # fmt: skip
        quantizer.process()
    model: onnx.ModelProto = quantizer.model.model
    if precision == "int4":
        _quantize_table(model)
    return bytes(model.SerializeToString(deterministic=True))


def _quantize_table(model: onnx.ModelProto) -> None:
    """Quantize the embeddings in place, two numbers per byte, since onnxruntime-web has no 4-bit tensors."""
    (row,) = (node.output[0] for node in model.graph.node if node.op_type == "Squeeze" and node.input[0] == TOKENS)
    node = next(node for node in model.graph.node if node.op_type == "Gather" and node.input[1] == row)
    table = next(constant for constant in model.graph.initializer if constant.name == node.input[0])
    weights = numpy_helper.to_array(table)
    if weights.shape[1] % (2 * BLOCK):
        return
    whole, scales, zeros = quantize_blocks(weights)
    constants = {
        f"{table.name}_whole": _packed(whole),
        f"{table.name}_scales": scales,
        f"{table.name}_zeros": _packed(zeros),
    }
    model.graph.initializer.remove(table)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    names = [*constants]
    node.CopyFrom(helper.make_node(
        "GatherBlockQuantized", [names[0], node.input[1], *names[1:]], [*node.output], name=node.name,
        domain="com.microsoft", gather_axis=0, quantize_axis=1, block_size=BLOCK, bits=_TABLE_BITS,
    ))  # fmt: skip


def quantize_blocks(weights: Array) -> tuple[Array, Array, Array]:
    """Quantize a matrix of weights to 4 bits: integers from 0 to 15, in blocks of 32 neighbors of a row.

    `weights` is (rows, width), and width must be a multiple of 32. Return three arrays: the integers, uint8 (rows,
    width), and for each block a scale, float32 (rows, blocks), and a zero point, uint8 (rows, blocks). A weight is
    about (integer - zero point) * scale.
    """
    blocks = weights.reshape(len(weights), -1, BLOCK)
    low, high = np.minimum(blocks.min(2), 0), np.maximum(blocks.max(2), 0)
    scales = np.where(high > low, (high - low) / 15, 1).astype(np.float32)
    zeros = np.rint(-low / scales).clip(0, 15)
    whole = np.rint(blocks / scales[..., None] + zeros[..., None]).clip(0, 15)
    return whole.reshape(weights.shape).astype(np.uint8), scales, zeros.astype(np.uint8)


def _packed(whole: Array) -> Array:
    packed: Array = whole[:, ::2] | whole[:, 1::2] << 4
    return packed


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
