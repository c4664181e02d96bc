"""The project of the effect, from photographs to a student, with a generator of a few weights."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, expect
from skimage.io import imread, imsave

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.onnx.runtime import predict, session
from isthmus.distill.runtimes.conversions import CONVERSIONS
from isthmus.distill.types import Array
from isthmus.features.files import read_pointer
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.site import site
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from isthmus.package.golden import read_golden
from isthmus.package.manifest import open_package, read_package
from tests.end_to_end.api import deployed
from tests.end_to_end.browsers import differing
from tests.end_to_end.files import served
from tests.serving.tensors import answered, as_binary

# Lowering a graph to ExecuTorch takes a quarter of a minute of a free core, once before training and once after.
pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "effects"
MODULES = ("definitions", "photographs", "painting", "generator")
PHOTOGRAPHS = ("chelsea", "rocket", "ihc", "coffee")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with less of everything: it keeps its data beside its modules."""
    root = tmp_path_factory.mktemp("effects")
    for file in (*EXAMPLE.glob("*.py"), EXAMPLE / "isthmus.toml"):
        shutil.copy(file, root / file.name)
    shutil.copytree(EXAMPLE / "pages", root / "pages")
    settings = root / "isthmus.toml"
    objective = settings.read_text().replace("latency_objective_ms = 33", "latency_objective_ms = 3000")
    settings.write_text(objective)
    changes = {
        "definitions.py": {
            # Gates are for a student that has learned.
            "    gates=[": "    gates=[] and [", "    split=": "    seeds=1,\n    split=", "steps=": "steps=8 or ",
            "batch=": "batch=2 or ", "width=16, depth=4, expand=3": "width=4, depth=1, expand=2",
        },
        "generator.py": {
            "WIDTH, BLOCKS = 24, 5": "WIDTH, BLOCKS = 8, 2", "CROP, RATE = 300, 16, 64": "CROP, RATE = 20, 4, 64",
        },
    }  # fmt: skip
    for name, pairs in changes.items():
        text = (root / name).read_text()
        for old, new in pairs.items():
            assert old in text
            text = text.replace(old, new)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def example(sources: Path) -> Iterator[dict[str, ModuleType]]:
    """The modules of the example."""
    sys.path.insert(0, str(sources))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(sources))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(sources: Path, example: dict[str, ModuleType]) -> Path:
    """A project with four frames of each of four photographs, and a generator that has learned a little."""
    example["photographs"].write(PHOTOGRAPHS, 2)
    example["generator"].main()
    return sources


@pytest.fixture(scope="module")
def distilled(folder: Path) -> DistillationReport:
    project = Project(folder)
    apply(project)
    build(project)
    training_set(project)
    report = distill(project)
    # Added now, so that no network is converted twice.
    with (folder / "isthmus.toml").open("a") as settings:
        settings.write('\n[packages]\nruntimes = ["executorch"]\n')
    exported = export(Project(folder))
    assert exported.left_out == {}
    assert differing(exported.path) == 0
    return report


@pytest.mark.slowest
def test_each_runtime_draws_the_golden_frame(distilled: DistillationReport, folder: Path) -> None:
    settings = folder / "isthmus.toml"
    before = settings.read_text()
    settings.write_text(before.replace('["executorch"]', json.dumps([*CONVERSIONS])))
    try:
        exported = export(Project(folder))
    finally:
        settings.write_text(before)
    assert exported.left_out == {}
    assert differing(exported.path) == 0
    (case,) = read_golden(open_package(exported.path)).cases
    assert len(case.outputs) == 8
    frame = case.feeds["image"]
    assert (exported.path / "golden.json").stat().st_size < 9 * (frame.nbytes * 4 / 3 + 100) + 1000


@pytest.mark.slowest
def test_one_golden_frame_shows_a_photograph_and_noise(distilled: DistillationReport, folder: Path) -> None:
    package = read_pointer(folder / ".isthmus" / "packages" / "effects.latest")
    manifest = read_package(package)
    assert manifest.model == distilled.id
    (case,) = read_golden(open_package(package)).cases
    frame = case.feeds["image"]
    # What is fed, and what each file answers: base64 of the floats of a frame each.
    frames = 1 + len(case.outputs)
    assert (package / "golden.json").stat().st_size < frames * (frame.nbytes * 4 / 3 + 100) + 1000
    # Above a photograph, of 8 bits, and below noise.
    levels = 255 * frame.astype(np.float64)
    whole = np.abs(levels - np.rint(levels)).max((0, 1, 3)) < 1e-3
    assert whole.tolist() == [True] * 192 + [False] * 64
    shipped = np.frombuffer((package / "image.rgb").read_bytes(), np.uint8).reshape(256, 256, 3)
    np.testing.assert_array_equal(np.rint(levels[0, :, :192]).transpose(1, 2, 0), shipped[:192])


@pytest.mark.slowest
def test_a_student_is_measured_against_its_teacher(distilled: DistillationReport) -> None:
    report = json.loads((distilled.path / "report.json").read_bytes())
    # Two photographs and a copy of each frame in another light; there are drawings of the rocket alone.
    assert report["rows"] == {"train": 16, "validation": 4, "test": 4, "unlabeled": 12}
    assert report["models"]["teacher"]["quality"]["ssim"] == 1
    near = {name: report["models"][name]["quality"]["psnr_of_label"] for name in ("student", "control")}
    assert report["measures"]["gain_on_labels"] == pytest.approx(near["student"] - near["control"])
    histories = {run["model"]: {*run["history"][-1]} for run in report["runs"]}
    terms = {"pixels", "perceptual", "adversarial", "labels"}
    assert terms <= histories["student"]
    assert terms & histories["control"] == {"labels"}


def test_a_bilateral_filter_is_the_one_of_its_formula(example: dict[str, ModuleType]) -> None:
    painting = example["painting"]
    image = torch.rand(1, 3, 9, 8, generator=torch.Generator().manual_seed(2))
    found = painting.bilateral(image)[0]
    around = np.pad(image[0].numpy(), ((0, 0), (painting.RADIUS,) * 2, (painting.RADIUS,) * 2), mode="reflect")
    for row in range(9):
        for column in range(8):
            center, total, weights = image[0, :, row, column].numpy(), np.zeros(3), 0.0
            for y in range(-painting.RADIUS, painting.RADIUS + 1):
                for x in range(-painting.RADIUS, painting.RADIUS + 1):
                    if np.hypot(x, y) <= painting.RADIUS + 0.5:
                        there = around[:, row + painting.RADIUS + y, column + painting.RADIUS + x]
                        near = np.exp(-(x * x + y * y) / 2 / painting.SPACE**2)
                        weight = near * np.exp(-((there - center) ** 2).sum() / 2 / painting.RANGE**2)
                        total, weights = total + weight * there, weights + weight
            assert found[:, row, column].numpy() == pytest.approx(total / weights, abs=1e-5)


@pytest.mark.slowest
def test_the_api_draws_what_onnx_runtime_draws(
    distilled: DistillationReport, folder: Path, example: dict[str, ModuleType], tmp_path: Path
) -> None:
    assert distilled.path.exists()
    with deployed(Project(folder), tmp_path / "log") as http:
        (model,) = http.get("/models").json()["models"]
        package = open_package(read_pointer(folder / ".isthmus" / "packages" / "effects.latest"))
        assert model["package"] == package.files.digest
        graph = session(package.files.read(f"model.{model['precision']}.ort"), 1)
        photograph = np.frombuffer(package.files.read("image.rgb"), np.uint8).reshape(1, 256, 256, 3)
        frame = (photograph / 255).astype(np.float32).transpose(0, 3, 1, 2)
        for fed in (*(case.feeds for case in read_golden(package).cases), {"image": np.ascontiguousarray(frame)}):
            content, headers = as_binary(fed, parameters={"binary_data_output": True})
            answer = http.post("/v2/models/effects/infer", content=content, headers=headers)
            assert answered(answer)["picture"].tobytes() == np.asarray(predict(graph, fed)).tobytes()
        subprocess.run([sys.executable, "ask.py"], cwd=folder, env=os.environ | {"API": str(http.base_url)}, check=True)
        pair = imread(folder / "data" / "asked.png")
        asked = example["photographs"].photograph("coffee")[20:276, 150:406]
        np.testing.assert_array_equal(pair[:, :256], asked)
        fed = {"image": np.ascontiguousarray((asked / 255).astype(np.float32).transpose(2, 0, 1))[None]}
        drawing = predict(graph, fed)[0].transpose(1, 2, 0)
        np.testing.assert_array_equal(pair[:, 256:], (255 * drawing).round().astype(np.uint8))
        two = np.repeat(np.ascontiguousarray(frame), 2, axis=0)
        content, headers = as_binary({"image": two})
        refused = http.post("/v2/models/effects/infer", content=content, headers=headers)
        assert (refused.status_code, refused.json()["where"]) == (413, "body")


@pytest.fixture(scope="module")
def drawing(distilled: DistillationReport, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of its package."""
    assert distilled.path.exists()
    return site(Project(folder), None, tmp_path_factory.mktemp("drawing"))


def colors(page: Page, canvas: str) -> Array:
    """Of a canvas, (256, 256, 3) from 0 to 255."""
    context = f"document.querySelector('#{canvas}').getContext('2d')"
    values = page.evaluate(f"[...{context}.getImageData(0, 0, 256, 256).data]")
    return np.array(values).reshape(256, 256, 4)[:, :, :3]


@pytest.mark.slowest
@pytest.mark.browser
def test_the_page_draws_on_a_phone(drawing: Path, phone: Callable[[str], Page], tmp_path: Path) -> None:
    photograph = np.full((260, 300, 3), 90, np.uint8)
    photograph[:, :, 0] = np.linspace(0, 255, 300)
    photograph[:, :, 2] = photograph[:, ::-1, 0]
    imsave(tmp_path / "mine.png", photograph, check_contrast=False)
    (tmp_path / "mine.txt").write_text("mine")
    precision = json.loads((drawing / "page.json").read_bytes())["precision"]
    graph = session((drawing / "package" / f"model.{precision}.ort").read_bytes(), 1)
    with served(drawing) as address:
        page = phone(address)
        expect(page.locator("#checks li.bad")).to_have_count(0)
        spent = page.locator("#spent")
        expect(spent).to_contain_text("ms for a frame of 256 x 256")
        given = np.frombuffer((drawing / "package" / "image.rgb").read_bytes(), np.uint8)
        np.testing.assert_array_equal(colors(page, "shown"), given.reshape(256, 256, 3))
        page.locator("[name=photograph]").set_input_files(tmp_path / "mine.txt")
        expect(spent).to_contain_text("mine.txt is no image")
        page.locator("[name=photograph]").set_input_files(tmp_path / "mine.png")
        expect(spent).to_contain_text("ms for a frame of 256 x 256")
        shown, drawn = (colors(page, name) for name in ("shown", "drawn"))
    frame = (shown / 255).astype(np.float32).transpose(2, 0, 1)[None]
    expected = predict(graph, {"image": frame})[0].transpose(1, 2, 0).clip(0, 1) * 255
    assert np.abs(shown[:, :, 1].astype(int) - 90).max() <= 1
    # A canvas has 256 shades, and rounds half to even or up.
    assert np.abs(expected - drawn).max() <= 1
