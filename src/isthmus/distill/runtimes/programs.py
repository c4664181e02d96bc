"""The programs that run model files of runtimes other than ONNX Runtime."""

from collections.abc import Mapping

from isthmus.distill.runtimes.coreml.process import CoreMLProgram
from isthmus.distill.runtimes.executorch.process import ExecuTorchProgram
from isthmus.distill.runtimes.litert.process import LiteRTProgram
from isthmus.distill.runtimes.process import Program
from isthmus.package.manifest import Format

PROGRAMS: Mapping[Format, type[Program]] = {
    "pte": ExecuTorchProgram,
    "tflite": LiteRTProgram,
    "mlpackage": CoreMLProgram,
}
INTERPRETED = ("mlpackage",)
"""Formats that an interpreter runs here instead of their runtime: it can only prove the parity of the graph."""
