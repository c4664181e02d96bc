"""A page whose stored features are too old: what was declared for that answers, or it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from isthmus.features.errors import ConfigurationError, DataError
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.create import snapshot
from isthmus.orchestration.snapshots.site import site
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from tests.end_to_end.files import served
from tests.orchestration.shop import HOUR, Shop, learnable, with_device, with_moment, write

pytestmark = [pytest.mark.browser, pytest.mark.accept]

BARE = """
bare = FeatureService("bare_device", features=[basket])
bare_order = Distillation(
    "bare_order", spine=placed, teacher=on_server, student=bare, task=Tabular(teacher_rounds=8, hidden=(8,)), seeds=1,
    gates=[],
)
"""


def _shop(root: Path, stale: str) -> Shop:
    shop = learnable(with_device(with_moment(write(root))))
    shop.append(BARE)
    shop.replace("task=Tabular(teacher_rounds=8, hidden=(16,)),", f"task=Tabular(hidden=(16,)), stale={stale},")
    return shop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    shop = _shop(tmp_path_factory.mktemp("stale") / "shop", '"bare_order"')
    project = Project(shop.root)
    for step in (apply, build, snapshot):
        step(project)
    for name in ("late_order", "bare_order"):
        training_set(project, name)
        distill(project, name)
        export(project, name)
    return shop


def _later(folder: Path, hours: int) -> None:
    """The page's clock, so many hours on."""
    note = json.loads((folder / "page.json").read_text())
    note["snapshot"]["now"] = str(int(note["snapshot"]["now"]) + hours * HOUR)
    (folder / "page.json").write_text(json.dumps(note))


def _answered(page: Page) -> tuple[str | None, float]:
    page.get_by_role("button", name="Predict").click()
    answer = page.locator("#answer")
    expect(answer).to_contain_text("in this browser")
    return answer.get_attribute("data-by"), float(answer.get_attribute("data-value") or "nan")


@pytest.mark.slowest
def test_another_model_or_a_number_answers_where_they_are_too_old(
    shop: Shop, phone: Callable[[str], Page], tmp_path: Path
) -> None:
    folder = site(Project(shop.root), "late_order", tmp_path / "other")
    with served(folder) as address:
        page = phone(address)
        # Of the page's own model, also where the other one reads the same fields.
        expect(page.locator("#checks")).to_contain_text("and request features are in the graph")
        assert _answered(page)[0] == "model"
        _later(folder, 7)
        page = phone(address)
        assert _answered(page)[0] == "instead"
        expect(page.locator("#answer")).to_contain_text("the stored features are 7 hours old")
    shop.replace('stale="bare_order"', "stale=0.25")
    export(Project(shop.root), "late_order")
    folder = site(Project(shop.root), "late_order", tmp_path / "number")
    _later(folder, 7)
    with served(folder) as address:
        assert _answered(phone(address)) == ("default", 0.25)
    # A snapshot that the page's package or key would refuse makes no page.
    key = Project(shop.root).snapshots / "key.pem"
    own = key.read_bytes()
    key.unlink()
    with pytest.raises(DataError, match=r"is not signed by the key .*Run `isthmus features snapshot`"):
        site(Project(shop.root), "late_order", tmp_path / "refused")
    key.write_bytes(own)
    shop.replace("stale=0.25", "stale=None")
    export(Project(shop.root), "late_order")
    folder = site(Project(shop.root), "late_order", tmp_path / "none")
    _later(folder, 7)
    with served(folder) as address:
        page = phone(address)
        page.get_by_role("button", name="Predict").click()
        expect(page.locator("#answer")).to_contain_text("the stored features are 7 hours old, of 2024-03-01")
        assert page.locator("#answer").get_attribute("data-by") is None


@pytest.mark.parametrize(
    ("stale", "expected"),
    [
        ("1.5", "stale: 1.5; expected a probability, or a distillation"),
        ('"bear_order"', "no other distillation is named 'bear_order' .did you mean bare_order"),
        ('"late_order"', "no other distillation is named 'late_order' .did you mean bare_order.*; expected bare_order"),
    ],
)
def test_a_wrong_declaration_is_named(tmp_path: Path, stale: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        apply(Project(_shop(tmp_path / "shop", stale).root))


def test_the_other_student_may_read_nothing_that_is_stored(tmp_path: Path) -> None:
    shop = _shop(tmp_path / "shop", '"bare_order"')
    shop.replace("features=[basket])\nbare_order", "features=[basket, shelf_demand])\nbare_order")
    with pytest.raises(ConfigurationError, match="the student of bare_order reads shelf_demand:sold_1d"):
        apply(Project(shop.root))
