"""The conversions of a student to the runtimes besides ONNX Runtime: ExecuTorch, LiteRT and Core ML."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from isthmus.distill.declaration import COREML, EXECUTORCH, LITERT, Distillation
from isthmus.distill.runtimes.coreml import export as coreml
from isthmus.distill.runtimes.coreml.process import CoreMLProgram
from isthmus.distill.runtimes.executorch import export as executorch
from isthmus.distill.runtimes.executorch.process import ExecuTorchProgram
from isthmus.distill.runtimes.libraries import require_installed
from isthmus.distill.runtimes.litert import export as litert
from isthmus.distill.runtimes.litert.process import LiteRTProgram
from isthmus.distill.runtimes.network import Converted, Portable
from isthmus.distill.runtimes.process import Program
from isthmus.distill.types import Index


class Conversion(NamedTuple):
    """The conversion of a student for a runtime; `program` is the class that runs the converted files.

    `files` takes a student, the numbers of the training rows, and the optional precisions that are wanted. It returns a
    function per file name, fp32 first, then in the order of preference. Each function converts the student to this
    file, or raises a GateFailed.
    """

    program: type[Program]
    files: Callable[[Portable, Index, Collection[str]], Mapping[str, Callable[[], Converted]]]


CONVERSIONS: Mapping[str, Conversion] = {
    EXECUTORCH: Conversion(ExecuTorchProgram, executorch.files),
    LITERT: Conversion(LiteRTProgram, litert.files),
    COREML: Conversion(CoreMLProgram, coreml.files),
}
INTERPRETED = ("mlpackage",)
"""Formats that an interpreter runs here instead of their runtime: it can only prove the parity of the graph."""


def conversions_for(declaration: Distillation) -> list[Conversion]:
    return [conversion for runtime, conversion in CONVERSIONS.items() if runtime in declaration.runtimes]


def require_runtimes(declaration: Distillation) -> None:
    require_installed(declaration.where, [each.program.libraries for each in conversions_for(declaration)])
