"""`isthmus model search` of a project: the step, its page, the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.features.errors import ConfigurationError
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.students import distill, search
from isthmus.orchestration.training.set import training_set
from tests.orchestration.shop import Open, Shop

DECLARED = """seeds=1,
    search=Search(shape={"width": (4, 8), "depth": (1, 2)}, trials=2, settings=Settings(epochs=1, batch=256)),
"""


def declare(shop: Shop, declared: str = DECLARED) -> None:
    shop.replace("    seeds=1, ", f"    {declared}    ")
    shop.replace("    RequestSource,\n", "    RequestSource,\n    Search,\n    Settings,\n")
    shop.replace("teacher_rounds=8", "teacher_rounds=40")
    shop.append('\n[profiles.serving]\nprecision = "fp32"\nlatency_objective_ms = 1000\n', "isthmus.toml")


def command(shop: Shop, *arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    code = f"import sys\n{before}\nfrom isthmus.orchestration.cli.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=shop.root, env=dict(os.environ), capture_output=True, text=True,
        timeout=200, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.slowest
def test_students_are_searched_and_shown(built: Shop, project: Open) -> None:
    declare(built)
    training_set(project(built))
    lacking = command(built, "model", "search", "--json", before="sys.modules['optuna'] = None")
    assert lacking.returncode == 3
    assert json.loads(lacking.stdout)["remedy"] == "install it: pip install 'isthmus[search]'"

    done = command(built, "model", "search", "late_order", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [one["status"] for one in report["tried"]] == ["trained"] * 2
    folder = Path(report["path"])
    assert folder.parent == built.state / "search" / "late_order"
    assert (folder.parent / "latest").read_text() == folder.name
    assert json.loads((folder / "search.json").read_bytes()) | {"path": str(folder)} == report
    assert "Recommended: width" in (folder / "search.html").read_text()

    shown = command(built, "model", "search", "--trials", "3")
    assert shown.returncode == 0, shown.stderr
    assert "3 students: 3 trained, 0 over budget, 0 failed." in shown.stdout
    assert "definitions.py: task=Tabular(hidden=(" in shown.stdout
    assert "recommended" in shown.stdout

    distill(project(built))
    page = (
        Artifacts(project(built), project(built).definitions.distillations["late_order"]).last_model() / "report.html"
    ).read_text()
    assert "Search</h2>" in page
    assert "Of 3 students, 3 fit the budget" in page

    built.replace("trials=2", "most_bytes=100, trials=2")
    refused = command(built, "model", "search")
    assert refused.returncode == 1
    assert "none of 2 students fit the budget; nearest is width" in refused.stderr
    assert "2 students: 0 trained, 2 over budget, 0 failed." in refused.stdout


def test_a_wrong_search_is_said_with_the_definitions(built: Shop, project: Open) -> None:
    declare(built, 'seeds=1, search=Search(shape={"units": (4, 8)}, trials=0),')
    with pytest.raises(ConfigurationError) as refused:
        search(project(built))
    assert [problem.where.partition("search: ")[2] for problem in refused.value.problems] == ["trials", "shape 'units'"]
