"""Export of torch networks as ONNX graphs."""

import logging
import warnings
from collections.abc import Mapping, Sequence

import torch
from onnx import ModelProto
from torch import nn

from isthmus.distill.types import Array

OPSET = 20


def export_network(
    network: nn.Module,
    inputs: Mapping[str, Array],
    sizes: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    max_sizes: Mapping[str, int] | None = None,
) -> ModelProto:
    """Export a torch network as an ONNX graph, with sizes that vary.

    Args:
        network: the network, which is switched to eval mode. Its arguments are the inputs, in order.
        inputs: an example of each input by name; each size that varies is at least 2.
        sizes: shape of each input by name. A name such as "N" stands for a size that varies, a number for a fixed one.
        outputs: names of the outputs.
        max_sizes: maximum of a size that varies, by its name; sizes without an entry have none.
    """
    named = {size for shape in sizes.values() for size in shape if isinstance(size, str)}
    known = {name: torch.export.Dim(name, max=(max_sizes or {}).get(name)) for name in sorted(named)}
    # A copy of each, because the exporter merges inputs that are the same tensor.
    examples = tuple(torch.from_numpy(array.copy()) for array in inputs.values())
    dynamic = tuple(
        {axis: known[size] for axis, size in enumerate(sizes[name]) if isinstance(size, str)} for name in inputs
    )
    # The exporter logs hints about other libraries.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # emitted by the exporter itself
        program = torch.onnx.export(
            network.eval(), examples, dynamo=True, opset_version=OPSET, verbose=False, external_data=False,
            dynamic_shapes=dynamic, input_names=[*inputs], output_names=[*outputs],
        )  # fmt: skip
    assert program is not None  # noqa: S101 - never None with dynamo
    return program.model_proto
