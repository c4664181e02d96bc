"""Phone runtimes (ExecuTorch, LiteRT, Core ML): `ProgramRuntime` runs a package's model files to verify them."""

from collections.abc import Mapping, Sequence

from isthmus.distill.runtimes.coreml.process import CoreMLProgram
from isthmus.distill.runtimes.executorch.process import ExecuTorchProgram
from isthmus.distill.runtimes.litert.process import LiteRTProgram
from isthmus.distill.runtimes.process import Program, ProgramRejected
from isthmus.package.golden import Inputs
from isthmus.package.manifest import Format, Manifest, Package, Variant
from isthmus.package.replay import GOLDEN_TOLERANCE, Answers, rejection_error

_PROGRAMS: Mapping[Format, type[Program]] = {
    "pte": ExecuTorchProgram,
    "tflite": LiteRTProgram,
    "mlpackage": CoreMLProgram,
}


class ProgramRuntime:
    """Runs model files in the phone runtime of a file format: ExecuTorch, LiteRT or Core ML.

    `kind` is the file format. Raises DependencyError if the runtime is missing. `ask` runs a file in a new process.
    """

    tolerance = GOLDEN_TOLERANCE

    def __init__(self, kind: Format) -> None:
        self._format, self._program = kind, _PROGRAMS[kind]
        self.name = self._program.libraries.name
        self._program.require_present()

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        return [variant for variant in manifest.variants if variant.format == self._format]

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[Answers]:
        manifest, model = package.manifest, package.files.read(variant.file)
        try:
            with self._program(model, manifest.fed(variant), manifest.outputs, variant.most) as program:
                return [program.ask(case.fed(variant)) for case in cases]
        except ProgramRejected as error:
            raise rejection_error(manifest, variant, self.name, error) from error
