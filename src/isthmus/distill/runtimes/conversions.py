"""The runtimes other than ONNX Runtime that a package can have model files for."""

from collections.abc import Mapping

from isthmus.distill.declaration import COREML, EXECUTORCH, LITERT, Distillation
from isthmus.distill.runtimes.coreml import export as coreml
from isthmus.distill.runtimes.executorch import export as executorch
from isthmus.distill.runtimes.libraries import require_installed
from isthmus.distill.runtimes.litert import export as litert
from isthmus.distill.runtimes.network import Conversion

CONVERSIONS: Mapping[str, Conversion] = {EXECUTORCH: executorch, LITERT: litert, COREML: coreml}


def conversions_for(declaration: Distillation) -> list[Conversion]:
    return [conversion for runtime, conversion in CONVERSIONS.items() if runtime in declaration.runtimes]


def require_runtimes(declaration: Distillation) -> None:
    require_installed(declaration.where, [conversion.LIBRARIES for conversion in conversions_for(declaration)])
