"""The pages of a project in a real browser with a phone's viewport, above all the page of a package of rows."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from skimage.io import imread

from isthmus.distill.onnx.runtime import predict, session
from isthmus.features.errors import DataError
from isthmus.features.values.columns import from_python
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts, page_file
from isthmus.orchestration.attribution.attribute import attribute
from isthmus.orchestration.attribution.report import page_file as attribution_page
from isthmus.orchestration.models.cards import PAGE, SEARCH
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill, export, search
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality.measure import quality
from isthmus.orchestration.quality.page import page as quality_page
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.snapshots.site import site
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.verify import verify
from isthmus.package.inputs import feeds
from isthmus.package.manifest import Manifest, read_package
from tests.end_to_end.files import served
from tests.orchestration import shop
from tests.orchestration.models.test_search import DECLARED
from tests.serving.support import free_port, wait

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    declared = shop.learnable(shop.with_moment(shop.write(tmp_path_factory.mktemp("pages") / "shop")))
    declared.replace("    seeds=1, ", f"    {DECLARED}    ")
    declared.replace("    RequestSource,\n", "    RequestSource,\n    Search,\n    Settings,\n")
    opened = Project(declared.root)
    for step in (apply, build, materialize, training_set, distill, export):
        step(opened)
    return opened


@pytest.fixture(scope="module")
def written(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site(project, None, tmp_path_factory.mktemp("site"))


def said(folder: Path, manifest: Manifest, row: dict[str, Any]) -> float:
    """What ONNX Runtime says in Python of one row."""
    columns = {item.name: from_python([row[item.name]], item.dtype) for item in manifest.model_inputs}
    opened = session((folder / "package" / "model.int8.ort").read_bytes(), 1)
    return float(predict(opened, feeds(manifest.model_inputs, columns))[0])


@pytest.mark.accept
def test_a_form_predicts_what_python_predicts(written: Path, phone: Callable[[str], Page]) -> None:
    manifest = read_package(written / "package")
    golden = json.loads((written / "package" / "golden.json").read_bytes())
    with served(written) as address:
        page = phone(address)
        checks = page.locator("#checks li.good")
        expect(checks).to_have_count(4)
        # The layers of whole numbers answer to the bit; the last layer and the sigmoid are floats.
        assert float(page.locator("#checks").get_attribute("data-worst") or "nan") <= 1e-6
        answer = page.locator("#answer")
        for place in (0, 1, 5):
            page.locator("#example").select_option(str(place))
            row = dict(zip(golden["inputs"], golden["cases"][0]["rows"][place], strict=True))
            page.get_by_role("button", name="Predict").click()
            expect(answer).to_contain_text("in this browser")
            assert float(answer.get_attribute("data-value") or "nan") == pytest.approx(
                said(written, manifest, row), abs=1e-6
            )
        # One input after the other is left empty.
        for name in row:
            page.locator(f'[name="{name}"]').fill("")
            row[name] = None
            before = answer.get_attribute("data-value")
            page.get_by_role("button", name="Predict").click()
            page.wait_for_function("before => document.querySelector('#answer').dataset.value !== before", arg=before)
            found, expected = float(answer.get_attribute("data-value") or "nan"), said(written, manifest, row)
            assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
        wrong = [
            ("hour", "soon is not a whole number"), ("weight", "heavy is not a number"),
            ("hour", f"{2**63} is out of range for Int64"), ("product", f"{-(2**31) - 1} is out of range for Int32"),
        ]  # fmt: skip
        for name, words in wrong:
            page.locator(f'[name="{name}"]').fill(words.split()[0])
            page.get_by_role("button", name="Predict").click()
            expect(answer).to_have_text(f"{name}: {words}")
            page.locator(f'[name="{name}"]').fill("")


@pytest.mark.accept
@pytest.mark.parametrize("harm", ["model.int8.ort", "golden.json", "contract"])
def test_what_was_altered_is_refused(written: Path, phone: Callable[[str], Page], tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    for file in written.iterdir():
        (folder / file.name).symlink_to(file)
    if harm == "contract":
        (folder / "page.json").unlink()
        (folder / "page.json").write_text(json.dumps({"contract": "e" * 64, "precision": "int8"}))
        expected = "expected eeeeeeeeeeee"
    else:
        (folder / "package").unlink()
        (folder / "package").mkdir()
        for file in (written / "package").iterdir():
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= file.name == harm
            (folder / "package" / file.name).write_bytes(content)
        expected = f"{harm}: SHA-256"
    with served(folder) as address:
        page = phone(address)
        expect(page.locator("#checks li.bad")).to_contain_text(expected)
        expect(page.locator("#form")).to_be_hidden()


@pytest.mark.accept
def test_a_picture_of_the_page_is_taken_for_the_documentation(project: Project, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.end_to_end.screenshots", str(project.root), "--out", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    picture = imread(tmp_path / f"{project.root.name}.png")
    assert picture.shape[:2] == (1688, 780)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 100, "something is drawn"


def test_the_verb_says_where_it_wrote(project: Project, tmp_path: Path) -> None:
    script, out = Path(sys.executable).with_name("isthmus"), tmp_path / "site"
    command = [str(script), "package", "page", "--out", str(out), "--json"]
    done = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"page": str(out), "open": f"python -m http.server --directory {out} 8080"}
    assert (out / "index.html").exists()


def test_a_folder_with_something_else_is_left_alone(project: Project, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="contains other files"):
        site(project, None, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.fixture
def pages(project: Project, written: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The address of each page that a project has."""
    verify(project, all_keys=True)
    deploy(project)
    files = {
        "quality": tmp_path / "quality.html",
        "verdict": page_file(project),
        "report": Artifacts.of(project).last_model() / PAGE,
        "attribution": attribution_page(attribute(project).folder),
        "search": search(project).path / SEARCH,
    }
    files["quality"].write_text(quality_page(quality(project, since=datetime(2024, 2, 1, tzinfo=UTC))))
    port = free_port()
    with (
        (tmp_path / "log").open("wb") as log,
        served(written) as package,
        serving(project, port=port, log=log, private=True),
    ):
        api = f"http://127.0.0.1:{port}"
        wait(lambda: _answers(api), "the server")
        yield {name: file.as_uri() for name, file in files.items()} | {
            "package": package, "status": f"{api}/status", "docs": f"{api}/docs"
        }  # fmt: skip


def _answers(api: str) -> bool:
    try:
        return httpx.get(f"{api}/readyz").is_success
    except httpx.TransportError:
        return False


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.timeout(300)
def test_every_page_fits_a_phone_in_light_and_dark(pages: dict[str, str], browser: Browser, tmp_path: Path) -> None:
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        view = browser.new_page(viewport={"width": 390, "height": 844}, is_mobile=True, color_scheme=scheme)
        for name, address in pages.items():
            view.goto(address, wait_until="networkidle")
            view.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
            widths = view.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
            assert widths == [390, 390], (name, scheme)
            if name != "docs":
                tables = "[...document.querySelectorAll('.wide')]"
                cut = f"{tables}.filter(each => each.scrollWidth > each.clientWidth + 1).length"
                assert view.evaluate(cut) == 0, f"{name}: a table is cut"
                assert "`" not in view.inner_text("body"), name
            tallest = view.evaluate(
                "Math.max(0, ...[...document.querySelectorAll('td:first-child')].map(cell => cell.offsetHeight))"
            )
            assert tallest < 120, f"{name}: a name stands letter below letter"
            view.screenshot(path=tmp_path / f"{name}-{scheme}.png")
            corner = imread(tmp_path / f"{name}-{scheme}.png")[0, 0, :3].mean()
            assert corner > 200 if scheme == "light" else corner < 60, (name, scheme, corner)
