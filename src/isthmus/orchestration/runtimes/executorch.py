"""ExecuTorch, to verify a package: whether a phone answers as recorded."""

from collections.abc import Sequence
from importlib.util import find_spec

from isthmus.distill.executorch.process import NAME, absent, opened
from isthmus.features.package.golden import Golden
from isthmus.features.package.manifest import Manifest, Package, Variant
from isthmus.features.package.replay import GOLDEN_TOLERANCE, Answers


class ExecuTorchRuntime:
    """ExecuTorch, in one process per model file, on one thread.

    Raises:
        DependencyError: it is not installed.
    """

    def __init__(self) -> None:
        if find_spec("executorch") is None:
            raise absent("is not installed")

    name = NAME
    tolerance = GOLDEN_TOLERANCE

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        """The ExecuTorch programs."""
        return [variant for variant in manifest.variants if variant.format == "pte"]

    def ask(self, package: Package, variant: Variant, golden: Golden) -> Sequence[Answers]:
        """A file's answers in the golden cases."""
        with opened(package, variant) as program:
            return [program.ask(case.feeds) for case in golden.cases]
