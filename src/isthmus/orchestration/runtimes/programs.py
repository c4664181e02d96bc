"""The runtimes of phones, to verify a package."""

from collections.abc import Sequence

from isthmus.distill.runtimes.process import opened
from isthmus.distill.runtimes.programs import PROGRAMS
from isthmus.package.golden import Inputs
from isthmus.package.manifest import Format, Manifest, Package, Variant
from isthmus.package.replay import GOLDEN_TOLERANCE, Answers


class ProgramRuntime:
    """The runtime of a format, in one process per model file, on one thread.

    Raises:
        DependencyError: it is not installed.
    """

    tolerance = GOLDEN_TOLERANCE

    def __init__(self, kind: Format) -> None:
        self._format, self._program = kind, PROGRAMS[kind]
        self.name = self._program.libraries.name
        self._program.require_present()

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        """The files in its format."""
        return [variant for variant in manifest.variants if variant.format == self._format]

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[Answers]:
        """A file's outputs for each batch of inputs."""
        with opened(self._program, package, variant) as program:
            return [program.ask(case.fed(variant)) for case in cases]
