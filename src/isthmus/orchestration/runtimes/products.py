"""What runs model files, by product name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.package.inspect import Runtime
    from isthmus.package.manifest import Format


@dataclass(frozen=True)
class Product:
    """A runtime: its name on the command line, and the formats that it takes. Called, it is opened."""

    option: str
    formats: "Sequence[Format]"

    def __call__(self) -> "Runtime":
        """Raises a DependencyError if it is not installed."""
        if self.option == "ort":
            from isthmus.package.inspect import OnnxRuntime

            return OnnxRuntime()
        if self.option == "web":
            from isthmus.orchestration.runtimes.web import WebRuntime

            return WebRuntime()
        from isthmus.orchestration.runtimes.programs import ProgramRuntime

        return ProgramRuntime(self.formats[0])


RUNTIMES: Mapping[str, Product] = {
    "ONNX Runtime": Product("ort", ("onnx", "ort")),
    "onnxruntime-web": Product("web", ("ort",)),
    "ExecuTorch": Product("executorch", ("pte",)),
    "LiteRT": Product("litert", ("tflite",)),
    "Core ML's graph": Product("coreml", ("mlpackage",)),
}
"""In the order in which a student is converted for them."""


def by_option(option: str) -> "Runtime":
    """The runtime of a name on the command line. Raises a DependencyError if it is not installed."""
    return next(product for product in RUNTIMES.values() if product.option == option)()
