"""Runtimes by product name: `RUNTIMES` has a `Product` for each, and `open_runtime` opens one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.features.errors import RequestError, did_you_mean, one_of

if TYPE_CHECKING:
    from isthmus.package.inspect import Runtime
    from isthmus.package.manifest import Format


@dataclass(frozen=True)
class Product:
    """A runtime that runs model files. Call it to open the runtime.

    `option` is its name on the command line. `formats` are the file formats that it runs. Opening onnxruntime-web
    installs it with npm if it is missing. Raises DependencyError if a runtime is not or cannot be installed.
    """

    option: str
    formats: "Sequence[Format]"

    def __call__(self) -> "Runtime":
        if self.option == "ort":
            from isthmus.package.inspect import OnnxRuntime

            return OnnxRuntime()
        if self.option == "web":
            from isthmus.orchestration.runtimes.web import WebRuntime

            return WebRuntime()
        from isthmus.orchestration.runtimes.programs import ProgramRuntime

        return ProgramRuntime(self.formats[0])


RUNTIMES: Mapping[str, Product] = {  # in the order in which a student is converted
    "ONNX Runtime": Product("ort", ("onnx", "ort")),
    "onnxruntime-web": Product("web", ("ort",)),
    "ExecuTorch": Product("executorch", ("pte",)),
    "LiteRT": Product("litert", ("tflite",)),
    "Core ML's graph": Product("coreml", ("mlpackage",)),
}


def open_runtime(option: str) -> "Runtime":
    """Open the runtime for a command line option: "ort", "web", "executorch", "litert" or "coreml".

    For "web", installs onnxruntime-web with npm if it is missing, which can take minutes. Raises a RequestError for an
    unknown option. Raises a DependencyError if the installation fails, or if another runtime is not installed.
    """
    products = {product.option: product for product in RUNTIMES.values()}
    if option not in products:
        raise RequestError(
            f"runtime {option!r}", f"is not known{did_you_mean(option, products)}", expected=one_of(products)
        )
    return products[option]()
