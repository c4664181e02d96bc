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
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from playwright.sync_api import Page, expect
from safetensors.torch import load_file, save_file
from skimage.io import imread, imsave
from skimage.metrics import peak_signal_noise_ratio

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.onnx.runtime import predict, session
from isthmus.distill.runtimes.conversions import CONVERSIONS
from isthmus.distill.settings import Settings
from isthmus.distill.types import Array
from isthmus.features.errors import DataError
from isthmus.features.files import read_pointer
from isthmus.features.profiles import TrainingProfile
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.site import site
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from isthmus.package.golden import read_golden
from isthmus.package.manifest import open_package, read_package
from tests.distill.support import material
from tests.end_to_end.api import deployed
from tests.end_to_end.browsers import differing
from tests.end_to_end.files import served
from tests.serving.tensors import answered, as_binary

# Lowering a graph to ExecuTorch takes a quarter of a minute of a free core, once before training and once after.
pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "effects"
MODULES = ("photographs", "painting", "networks", "teaching", "effects")
PHOTOGRAPHS = ("chelsea", "rocket", "ihc", "coffee")
TINY = '''\
"""The same task with less of everything."""

from effects import Effects

from isthmus.distill.settings import Settings


class Tiny(Effects):
    generator_shape = {"width": 8, "blocks": 2}
    generator_settings = Settings(steps=10, batch=4, learning_rate=3e-3)
    crop = 64
    shape = {"width": 4, "wider": 2, "blocks": 1}
'''


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example: what learns there is kept beside its modules."""
    root = tmp_path_factory.mktemp("effects")
    for file in (*EXAMPLE.glob("*.py"), EXAMPLE / "isthmus.toml"):
        shutil.copy(file, root / file.name)
    shutil.copytree(EXAMPLE / "pages", root / "pages")
    settings = root / "isthmus.toml"
    objective = settings.read_text().replace("latency_objective_ms = 33", "latency_objective_ms = 3000")
    settings.write_text(f"{objective}\n[packages]\nruntimes = {json.dumps([*CONVERSIONS])}\n")
    (root / "tiny.py").write_text(TINY)
    # Gates are for a student that has learned.
    definitions = (root / "definitions.py").read_text().replace("effects:Effects", "tiny:Tiny")
    definitions = definitions.replace("    gates=[", "    gates=[] and [").replace("seeds=3", "seeds=1")
    (root / "definitions.py").write_text(definitions.replace("steps=", "steps=8 or ").replace("batch=", "batch=2 or "))
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
    """A project with a few frames of four photographs: of one that is learned from there are drawings."""
    table = example["photographs"].frames()
    some = [table.filter(pc.equal(table["photograph"], name)).slice(0, 4) for name in PHOTOGRAPHS]
    (sources / "data").mkdir()
    pq.write_table(pa.concat_tables(some), sources / "data" / "frames.parquet")
    return sources


@pytest.fixture(scope="module")
def distilled(folder: Path) -> DistillationReport:
    project = Project(folder)
    apply(project)
    build(project)
    training_set(project)
    report = distill(project)
    exported = export(project)
    assert exported.left_out == {}
    assert differing(exported.path) == 0
    return report


def test_one_golden_frame_shows_a_photograph_and_noise(distilled: DistillationReport, folder: Path) -> None:
    package = read_pointer(folder / ".isthmus" / "packages" / "effects.latest")
    manifest = read_package(package)
    assert manifest.model == distilled.id
    (case,) = read_golden(open_package(package)).cases
    frame = case.feeds["frame"]
    # What is fed, and what eight files answer: base64 of the floats of a frame each.
    assert len(case.outputs) == 8
    assert (package / "golden.json").stat().st_size < 9 * (frame.nbytes * 4 / 3 + 100) + 1000
    # Above a photograph, of 8 bits, and below noise.
    levels = 255 * frame.astype(np.float64)
    whole = np.abs(levels - np.rint(levels)).max((0, 1, 3)) < 1e-3
    assert whole.tolist() == [True] * 192 + [False] * 64
    shipped = np.frombuffer((package / "photograph.rgb").read_bytes(), np.uint8).reshape(256, 256, 3)
    np.testing.assert_array_equal(np.rint(levels[0, :, :192]).transpose(1, 2, 0), shipped[:192])


def test_a_student_is_measured_against_its_teacher(distilled: DistillationReport) -> None:
    report = json.loads((distilled.path / "report.json").read_bytes())
    # Four times the four frames with a drawing; the four others, and a copy of each in another light.
    assert report["rows"] == {"train": 24, "validation": 4, "test": 4}
    assert report["models"]["teacher"]["quality"]["ssim"] == 1
    assert report["models"]["teacher"]["quality"]["flicker"] == 0
    assert report["models"]["teacher"]["quality"]["psnr"] is None
    for name in ("student", "control"):
        quality = report["models"][name]["quality"]
        assert 0 < quality["ssim"] < 1
        assert quality["flicker"] == pytest.approx(quality["change"] - report["models"]["teacher"]["quality"]["change"])
    assert report["measures"]["fewer_multiply_adds"] > 10
    near = {name: report["models"][name]["quality"]["psnr_of_effect"] for name in ("student", "control")}
    assert report["measures"]["worth"] == pytest.approx(near["student"] - near["control"])
    terms = {"pixels", "perceptual", "adversarial", "drawn"}
    (student,) = (run for run in report["runs"] if run["model"] == "student")
    (control,) = (run for run in report["runs"] if run["model"] == "control")
    assert terms <= set(student["history"][-1])
    assert terms & set(control["history"][-1]) == {"drawn"}


def test_a_generator_that_has_learned_is_kept_by_its_recipe(example: dict[str, ModuleType], tmp_path: Path) -> None:
    said: list[str] = []

    def learned(steps: int) -> dict[str, torch.Tensor]:
        settings, shape = Settings(steps=steps, batch=2), {"width": 4, "blocks": 1}
        generator = example["teaching"].taught(
            [("chelsea", 5, 9)], ["its digest"], shape, settings, 16, TrainingProfile(), tmp_path,
            lambda text, _done: said.append(text),
        )  # fmt: skip
        assert not generator.training
        return {name: weights.clone() for name, weights in generator.state_dict().items()}

    first = learned(2)
    (file,) = tmp_path.glob("generator-*.safetensors")
    kept = load_file(file)
    save_file({name: weights + 1 for name, weights in kept.items()}, file)
    assert any("step 2 of 2" in text for text in said), said
    said.clear()
    again, other = learned(2), learned(3)
    for name, weights in first.items():
        assert torch.equal(weights, kept[name])
        assert torch.equal(weights + 1, again[name])
    assert any(not torch.equal(weights, first[name]) for name, weights in other.items())
    assert len(list(tmp_path.glob("generator-*.safetensors"))) == 2


def test_a_seed_decides_how_a_frame_is_augmented(example: dict[str, ModuleType]) -> None:
    augmented = example["effects"].augmented
    frame, pixels = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(4)), "0123456789abcdef" * 4
    assert torch.equal(augmented(frame, 0, pixels), frame)
    first = augmented(frame, 1, pixels)
    assert torch.equal(first, augmented(frame, 1, pixels))
    for other in (frame, augmented(frame, 2, pixels), augmented(frame, 1, pixels[::-1])):
        assert not torch.equal(first, other)
    assert 0 <= first.min() <= first.max() <= 1


def test_an_unknown_drawing_teaches_nothing(example: dict[str, ModuleType]) -> None:
    images, drawings = torch.zeros(3, 3, 4, 4, requires_grad=True), torch.full((3, 3, 4, 4), 0.25)
    drawings[1] = torch.nan
    loss = example["effects"].drawing_loss(images, drawings)
    loss.backward()
    assert loss.item() == pytest.approx(0.25)
    assert images.grad is not None
    assert images.grad.flatten(1).abs().sum(1).bool().tolist() == [True, False, True]
    nothing = example["effects"].drawing_loss(images, torch.full_like(drawings, torch.nan))
    nothing.backward()
    assert nothing.item() == 0


def test_drawings_are_known_of_one_photograph_and_the_teacher_is_asked_for_all(example: dict[str, ModuleType]) -> None:
    table = example["photographs"].frames()
    table = table.rename_columns([{"pixels": "frames__pixels"}.get(name, name) for name in table.column_names])
    options: dict[str, Any] = {"task": "effects:Effects", "split": (0.7, 0.04, 0.26), "split_by": "photograph"}
    task = example["effects"].Effects(material(table, **options))
    train = task.material.parts.train
    assert {task.places[row][0] for row in task.with_drawing} == {"rocket"}
    assert np.isin(train, task.with_drawing).sum() == 4 * 32
    seeds = np.array(task.seed_of)
    assert (seeds[train] == 1).sum() == 4 * 32
    assert (seeds[[*task.material.parts.validation, *task.material.parts.test]] == 0).all()
    rows = torch.tensor([*task.with_drawing[:1], *np.flatnonzero(seeds)[:1]])
    _, labels = task.batch(rows)
    assert labels is not None
    assert labels.isnan().flatten(1).all(1).tolist() == [False, True]
    assert len(np.unique(task.identities(), axis=0)) == len(seeds) == 256 + 4 * 32
    nobody = type("Nobody", (example["effects"].Effects,), {"paired": ("coffee",)})
    with pytest.raises(DataError, match=r"no training frame has a drawing.*coffee"):
        nobody(material(table, **options))


def test_the_graph_draws_what_the_student_draws(distilled: DistillationReport, example: dict[str, ModuleType]) -> None:
    networks = example["networks"]
    student = networks.Painter(width=4, wider=2, blocks=1)
    student.load_state_dict(load_file(distilled.path / "student.safetensors"))
    graph = session(networks.exported(student).SerializeToString(), 1)
    for count in (1, 3):
        frames = torch.rand(count, 3, 256, 256, generator=torch.Generator().manual_seed(count))
        with torch.inference_mode():
            expected = student(frames)
        torch.testing.assert_close(
            torch.from_numpy(predict(graph, {"frame": frames.numpy()})), expected, atol=1e-5, rtol=0
        )


def test_a_network_begins_with_the_photograph_and_takes_other_sizes(example: dict[str, ModuleType]) -> None:
    networks = example["networks"]
    image = torch.rand(1, 3, 40, 64)
    for network in (networks.Generator(width=4, blocks=1), networks.Painter(width=4, wider=2, blocks=1)):
        with torch.inference_mode():
            clear = torch.sigmoid(torch.tensor(networks.CLEAR))
            torch.testing.assert_close(network(image), image * clear)


def test_a_student_that_is_shipped_costs_a_tenth_of_its_teacher(example: dict[str, ModuleType]) -> None:
    networks, task = example["networks"], example["effects"].Effects
    teacher, student = networks.Generator(**task.generator_shape), networks.Painter(**task.shape)
    assert networks.multiply_adds(teacher) >= 10 * networks.multiply_adds(student)
    # Of a convolution: one for each weight and each pixel of what it gives.
    layer = torch.nn.Conv2d(3, 5, 3, stride=2, padding=1)
    assert networks.multiply_adds(layer) == 3 * 5 * 9 * 128 * 128


def test_the_frames_are_the_same_each_time_and_each_has_a_neighbor(example: dict[str, ModuleType]) -> None:
    photographs = example["photographs"]
    table = photographs.frames()
    assert table.equals(photographs.frames())
    places = {(row["photograph"], row["x"], row["y"]) for row in table.to_pylist()}
    assert len(places) == table.num_rows == 256
    right, down = photographs.PAN
    assert sum((name, x + right, y + down) in places for name, x, y in places) >= table.num_rows / 2
    for row in table.to_pylist():
        frame = photographs.cut(photographs.photograph(row["photograph"]), row["x"], row["y"])
        assert frame.shape == (256, 256, 3)
        assert frame.dtype == np.uint8


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


def test_ink_is_where_dark_meets_light_and_nowhere_else(example: dict[str, ModuleType]) -> None:
    effect = example["painting"].effect
    image = torch.full((1, 3, 40, 60), 0.3)
    image[..., 30:] = 0.7
    drawn = effect(image)[0].mean(0)[20]
    assert drawn[20:30].min() < 0.3 * 0.5
    assert torch.allclose(drawn[[2, 57]] / torch.tensor([0.3, 0.7]), drawn[2] / 0.3)
    assert 0 <= drawn.min() <= drawn.max() <= 1


def test_what_does_not_change_from_frame_to_frame_is_no_flicker(example: dict[str, ModuleType]) -> None:
    effects, photographs = example["effects"], example["photographs"]
    name, (right, down) = "coffee", photographs.PAN
    corners = [(10, 20), (10 + right, 20 + down)]
    film = [photographs.cut(photographs.photograph(name), x, y).transpose(2, 0, 1) / 255 for x, y in corners]
    assert effects.changed(film, [(0, 1)]) == 0
    brighter = [film[0], film[1] + 3 / 255]
    assert effects.changed(brighter, [(0, 1)]) == pytest.approx(3)
    assert np.isnan(effects.changed(film, []))


def test_the_noise_of_an_image_is_measured_as_others_measure_it(example: dict[str, ModuleType]) -> None:
    effects, draw = example["effects"], np.random.default_rng(1)
    images, wanted = (draw.random((2, 3, 16, 16), np.float32) for _ in range(2))
    assert effects.psnr(images, wanted) == pytest.approx(peak_signal_noise_ratio(wanted, images, data_range=1))  # type: ignore[no-untyped-call]
    assert effects.psnr(images, images) == np.inf
    assert effects.ssim(images, images) == 1 > effects.ssim(images, wanted)


def test_the_api_draws_what_onnx_runtime_draws(
    distilled: DistillationReport, folder: Path, example: dict[str, ModuleType], tmp_path: Path
) -> None:
    assert distilled.path.exists()
    with deployed(Project(folder), tmp_path / "log") as http:
        (model,) = http.get("/models").json()["models"]
        package = open_package(read_pointer(folder / ".isthmus" / "packages" / "effects.latest"))
        assert model["package"] == package.files.digest
        graph = session(package.files.read(f"model.{model['precision']}.ort"), 1)
        photograph = np.frombuffer(package.files.read("photograph.rgb"), np.uint8).reshape(1, 256, 256, 3)
        frame = (photograph / 255).astype(np.float32).transpose(0, 3, 1, 2)
        for fed in (*(case.feeds for case in read_golden(package).cases), {"frame": np.ascontiguousarray(frame)}):
            content, headers = as_binary(fed, parameters={"binary_data_output": True})
            answer = http.post("/v2/models/effects/infer", content=content, headers=headers)
            assert answered(answer)["image"].tobytes() == np.asarray(predict(graph, fed)).tobytes()
        subprocess.run([sys.executable, "ask.py"], cwd=folder, env=os.environ | {"API": str(http.base_url)}, check=True)
        pair = imread(folder / "data" / "asked.png")
        asked = example["photographs"].cut(example["photographs"].photograph("coffee"), 150, 20)
        np.testing.assert_array_equal(pair[:, :256], asked)
        fed = {"frame": np.ascontiguousarray((asked / 255).astype(np.float32).transpose(2, 0, 1))[None]}
        drawing = predict(graph, fed)[0].transpose(1, 2, 0)
        np.testing.assert_array_equal(pair[:, 256:], (255 * drawing).round().astype(np.uint8))
        two = np.repeat(np.ascontiguousarray(frame), 2, axis=0)
        content, headers = as_binary({"frame": two})
        refused = http.post("/v2/models/effects/infer", content=content, headers=headers)
        assert (refused.status_code, refused.json()["where"]) == (413, "body")


def test_a_frame_of_other_pixels_is_refused(distilled: DistillationReport, folder: Path) -> None:
    file = folder / "data" / "frames.parquet"
    table = pq.read_table(file)
    other = pa.array(["0" * 64, *table["pixels"].to_pylist()[1:]])
    pq.write_table(table.set_column(table.column_names.index("pixels"), "pixels", other), file)
    project = Project(folder)
    build(project)
    training_set(project)
    with pytest.raises(DataError, match=r"frame of chelsea at 0, 0: its pixels have changed since the table"):
        distill(project)


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
        given = np.frombuffer((drawing / "package" / "photograph.rgb").read_bytes(), np.uint8)
        np.testing.assert_array_equal(colors(page, "shown"), given.reshape(256, 256, 3))
        page.locator("[name=photograph]").set_input_files(tmp_path / "mine.txt")
        expect(spent).to_contain_text("mine.txt is no image")
        page.locator("[name=photograph]").set_input_files(tmp_path / "mine.png")
        expect(spent).to_contain_text("ms for a frame of 256 x 256")
        shown, drawn = (colors(page, name) for name in ("shown", "drawn"))
    frame = (shown / 255).astype(np.float32).transpose(2, 0, 1)[None]
    expected = predict(graph, {"frame": frame})[0].transpose(1, 2, 0).clip(0, 1) * 255
    assert np.abs(shown[:, :, 1].astype(int) - 90).max() <= 1
    # A canvas has 256 shades, and rounds half to even or up.
    assert np.abs(expected - drawn).max() <= 1
