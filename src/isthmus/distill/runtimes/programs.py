"""What runs the model files that are not for ONNX Runtime."""

from collections.abc import Mapping

from isthmus.distill.runtimes.coreml.process import Program as CoreMLProgram
from isthmus.distill.runtimes.executorch.process import Program as ExecuTorchProgram
from isthmus.distill.runtimes.litert.process import Program as LiteRTProgram
from isthmus.distill.runtimes.process import Program
from isthmus.package.manifest import Format

PROGRAMS: Mapping[Format, type[Program]] = {
    "pte": ExecuTorchProgram,
    "tflite": LiteRTProgram,
    "mlpackage": CoreMLProgram,
}
"""By the format of the file."""

INTERPRETED = ("mlpackage",)
"""The formats whose runtime is not here: what runs a file proves the parity of its graph alone."""
