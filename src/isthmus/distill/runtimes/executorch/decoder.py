"""A causal language model as an ExecuTorch program that reads one token at a time, prompts included.

With a dynamic number of tokens, ExecuTorch's passes would fix every tensor at the size of the example.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.onnx.runtime import Run
from isthmus.distill.runtimes.executorch.export import lowered
from isthmus.distill.runtimes.executorch.process import LIBRARIES, ExecuTorchProgram
from isthmus.distill.runtimes.network import quiet, unconvertible
from isthmus.distill.runtimes.process import ProgramRejected
from isthmus.features.errors import GateFailed
from isthmus.package.generation.prompt import PAST, TOKENS
from isthmus.package.manifest import TensorInfo

FILE = "model.fp32.pte"


def max_sizes(network: CachedModel) -> dict[str, int]:
    return {TOKENS: 1, PAST: network.context}


def converted(network: CachedModel) -> bytes:
    """Convert a decoder, with reproducible bytes. Raises a GateFailed if ExecuTorch does not support it."""
    past = torch.zeros(1, network.context, 2 * network.layers, network.shared, network.width)
    sizes: tuple[dict[int, Any], ...] = ({}, {1: torch.export.Dim(PAST, max=network.context)})
    try:
        with quiet(), torch.no_grad():
            exported = torch.export.export(
                network.eval(), (torch.ones(1, 1, dtype=torch.int64), past), dynamic_shapes=sizes
            )
            return lowered(exported)
    except Exception as error:  # errors of torch, XNNPACK and ExecuTorch share no base class
        raise unconvertible(FILE, LIBRARIES, error) from error


@contextmanager
def running(
    program: bytes, network: CachedModel, tensors: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
) -> Iterator[Run]:
    try:
        with ExecuTorchProgram(program, tensors, outputs, max_sizes(network)) as opened:
            yield opened.ask
    except ProgramRejected as error:
        raise GateFailed(FILE, f"{LIBRARIES.name} refuses it ({error})", remedy="report this bug") from error
