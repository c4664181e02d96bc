"""A causal language model as a program of ExecuTorch, which takes one token at a time.

A prompt is read token by token, too. With an open number of tokens, ExecuTorch's passes give each tensor of the program
the size of the example.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.onnx.runtime import Run
from isthmus.distill.runtimes.executorch.process import LIBRARIES, Program
from isthmus.distill.runtimes.network import quiet, unconvertible
from isthmus.distill.runtimes.process import Refused
from isthmus.features.errors import GateFailed
from isthmus.package.generation.prompt import PAST, TOKENS
from isthmus.package.manifest import TensorInfo

FILE = "model.fp32.pte"


def max_sizes(network: CachedModel) -> dict[str, int]:
    """The maximum of each named size."""
    return {TOKENS: 1, PAST: network.context}


def converted(network: CachedModel) -> bytes:
    """The program; the same decoder gives the same bytes. Raises a GateFailed if ExecuTorch does not support it."""
    past = torch.zeros(1, network.context, 2 * network.layers, network.shared, network.width)
    sizes: tuple[dict[int, Any], ...] = ({}, {1: torch.export.Dim(PAST, max=network.context)})
    try:
        with quiet(), torch.no_grad():
            # These imports take ten seconds.
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            exported = torch.export.export(
                network.eval(), (torch.ones(1, 1, dtype=torch.int64), past), dynamic_shapes=sizes
            )
            lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
            return bytes(lowered.to_executorch().buffer)
    except Exception as error:  # those of torch, XNNPACK and ExecuTorch have no base class in common
        raise unconvertible(FILE, LIBRARIES, error) from error


@contextmanager
def running(
    program: bytes, network: CachedModel, tensors: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
) -> Iterator[Run]:
    """Runs a program in a process of its own within the context. Raises a GateFailed if ExecuTorch refuses it."""
    try:
        with Program(program, tensors, outputs, max_sizes(network)) as opened:
            yield opened.ask
    except Refused as error:
        raise GateFailed(FILE, f"{LIBRARIES.name} refuses it ({error})", remedy="report this") from error
