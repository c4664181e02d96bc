"""Phone runtimes (ExecuTorch, LiteRT, Core ML) that verify packages."""

from collections.abc import Sequence

from isthmus.distill.runtimes.process import opened
from isthmus.distill.runtimes.programs import PROGRAMS
from isthmus.package.golden import Inputs
from isthmus.package.manifest import Format, Manifest, Package, Variant
from isthmus.package.replay import GOLDEN_TOLERANCE, Answers


class ProgramRuntime:
    """Runtime of a file format. Runs each model file in a separate process on one thread.

    Raises:
        DependencyError: the runtime is not installed.
    """

    tolerance = GOLDEN_TOLERANCE

    def __init__(self, kind: Format) -> None:
        self._format, self._program = kind, PROGRAMS[kind]
        self.name = self._program.libraries.name
        self._program.require_present()

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        return [variant for variant in manifest.variants if variant.format == self._format]

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[Answers]:
        with opened(self._program, package, variant) as program:
            return [program.ask(case.fed(variant)) for case in cases]
