"""What a browser's runtime says of an INT8 model, beside what is recorded."""

from pathlib import Path

import numpy as np

from isthmus.orchestration.runtimes.web import WebRuntime
from isthmus.package.golden import read_golden
from isthmus.package.manifest import open_package


def differing(package: Path) -> int:
    """In how many values of the golden cases its bits are others."""
    opened = open_package(package)
    golden, variant = read_golden(opened), opened.manifest.variant("int8")
    answers = WebRuntime().ask(opened, variant, golden.cases)
    return sum(
        int(np.count_nonzero(theirs[name].view(np.int32) != kept.array.view(np.int32)))
        for case, theirs in zip(golden.cases, answers, strict=True)
        for name, kept in case.outputs[variant.file].items()
    )
