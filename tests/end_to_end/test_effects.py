"""The project of the effect, from photographs to a student, with a generator of a few weights."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from skimage.metrics import peak_signal_noise_ratio

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.runtime import predict, session
from isthmus.orchestration.models import distill
from isthmus.orchestration.project import Project
from isthmus.orchestration.registration import apply
from isthmus.orchestration.tables import build
from isthmus.orchestration.trainingset import training_set

EXAMPLE = Path(__file__).parents[2] / "examples" / "effects"
MODULES = ("photographs", "painting", "networks", "teaching", "effects")
TINY = '''\
"""The same task with less of everything."""

from effects import Effects

from isthmus.distill.settings import Settings


class Tiny(Effects):
    generator_shape = {"width": 8, "blocks": 2}
    generator_settings = Settings(steps=30, batch=4, learning_rate=3e-3)
    crop = 64
    shape = {"width": 4, "wider": 2, "blocks": 1}
'''


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The modules of the example."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, example: dict[str, ModuleType]) -> Path:
    """A project with a few frames of three photographs."""
    root = tmp_path_factory.mktemp("effects")
    for file in EXAMPLE.glob("*.py"):
        shutil.copy(file, root / file.name)
    shutil.copy(EXAMPLE / "isthmus.toml", root / "isthmus.toml")
    (root / "tiny.py").write_text(TINY)
    definitions = (root / "definitions.py").read_text().replace("effects:Effects", "tiny:Tiny")
    (root / "definitions.py").write_text(definitions.replace("steps=", "steps=20 or ").replace("batch=", "batch=2 or "))
    table = example["photographs"].frames()
    some = [table.filter(pc.equal(table["photograph"], name)).slice(0, 4) for name in ("chelsea", "ihc", "coffee")]
    (root / "data").mkdir()
    pq.write_table(pa.concat_tables(some), root / "data" / "frames.parquet")
    return root


@pytest.fixture(scope="module")
def distilled(folder: Path) -> DistillationReport:
    project = Project(folder)
    apply(project)
    build(project)
    training_set(project)
    return distill(project)


def test_the_student_draws_more_like_its_teacher_than_a_photograph_does(distilled: DistillationReport) -> None:
    report = json.loads((distilled.path / "report.json").read_bytes())
    assert report["rows"] == {"train": 4, "validation": 4, "test": 4}
    assert report["models"]["teacher"]["quality"]["ssim"] == 1
    assert report["models"]["teacher"]["quality"]["flicker"] == 0
    assert report["models"]["teacher"]["quality"]["psnr"] is None
    for name in ("student", "control"):
        quality = report["models"][name]["quality"]
        assert 0 < quality["ssim"] < 1
        assert quality["flicker"] == pytest.approx(
            quality["change"] - report["models"]["teacher"]["quality"]["change"]
        )
    assert report["measures"]["fewer_multiply_adds"] > 10
    terms = {"pixels", "perceptual", "adversarial", "drawn"}
    (student,) = (run for run in report["runs"] if run["model"] == "student")
    (control,) = (run for run in report["runs"] if run["model"] == "control")
    assert terms <= set(student["history"][-1])
    assert terms & set(control["history"][-1]) == {"drawn"}
