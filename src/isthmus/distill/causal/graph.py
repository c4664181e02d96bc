"""The graph of a causal student: tokens and positions of whole blocks to logits."""

import logging
import warnings
from typing import Any

import torch
from onnx import ModelProto, numpy_helper
from torch import nn

from isthmus.distill.causal.network import Packed
from isthmus.features.errors import extra

OPSET = 20
INPUTS = ("input_ids", "position_ids")


_traced: dict[str, ModelProto] = {}
"""By its configuration the graph that this process has traced last, which takes seconds; other weights are put into it
at once."""


def graph(packed: Packed, context: int) -> ModelProto:
    """`trace` of a network, or the graph of another with its configuration, with the weights of this one."""
    key = f"{context} {packed.model.config.to_json_string()}"
    if key not in _traced:
        _traced.clear()  # each has all weights
        _traced[key] = trace(packed, context)
    return filled(_traced[key], packed) or trace(packed, context)


def trace(packed: nn.Module, context: int) -> ModelProto:
    """From `input_ids` and `position_ids`, int64 (N, P), to `logits`, float32 (N, P, classes).

    Not optimized, which runtimes do by themselves, so that each weight has its name.
    """
    with extra("text"):
        import onnxscript  # noqa: F401 - the exporter needs it, and says so in words of its own
    length = min(8, context)
    tokens, positions = torch.ones((2, length), dtype=torch.int64), torch.arange(length).repeat(2, 1)
    sizes: dict[int, Any] = {0: torch.export.Dim("N"), 1: torch.export.Dim("P", max=context)}
    # It says what it could do for networks of other libraries.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.onnx.export(
            packed.eval(), (tokens, positions), dynamo=True, optimize=False, opset_version=OPSET, verbose=False,
            external_data=False, dynamic_shapes=(sizes, sizes), input_names=INPUTS, output_names=["logits"],
        )  # fmt: skip
    assert program is not None  # noqa: S101 - with dynamo
    model = program.model_proto
    for part in (
        model,
        model.graph,
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
    ):
        del part.metadata_props[:]  # where in which file each came from: on another machine it has other bytes
    return model


def filled(model: ModelProto, packed: nn.Module) -> ModelProto | None:
    """A copy of the graph of a network of the same sizes with the weights of this one; None if it lacks a weight."""
    weights = dict(packed.named_parameters(remove_duplicate=False))
    copied, found = ModelProto(), set()
    copied.CopyFrom(model)
    for tensor in copied.graph.initializer:
        if tensor.name in weights:
            found.add(id(weights[tensor.name]))
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name].detach().numpy(), tensor.name))
    return copied if found == {id(weight) for weight in weights.values()} else None
