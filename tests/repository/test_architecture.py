"""Who imports whom, and what a command or a server loads."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_imports_go_one_way_with_no_exception() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert contracts
    assert not any(key.startswith("ignore") for contract in contracts for key in contract)
    lint = [str(Path(sys.executable).with_name("lint-imports"))]
    done = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_room_is_small_and_on_the_map() -> None:
    package = ROOT / "src" / "isthmus"
    rooms = {init.parent for init in package.rglob("__init__.py")} - {package}
    assert len(rooms) >= 45
    modules = {room: len([*room.glob("*.py")]) - 1 for room in rooms}
    assert {room: count for room, count in modules.items() if count > 11} == {}
    parts = (ROOT / "CONTRIBUTING.md").read_text().split("\n### ")
    packages = {part.partition(":")[0]: part for part in parts}
    for room in rooms:
        owner, *inner = room.relative_to(package).parts
        assert not inner or f"`{inner[0]}`" in packages[owner], room


def test_the_drawing_has_the_rooms_that_are_there() -> None:
    script = ROOT / "docs" / "plots" / "rooms.py"
    drawn = runpy.run_path(str(script))["drawing"]()
    assert script.with_suffix(".svg").read_text() == drawn, f"run `python {script.relative_to(ROOT)}`"


@pytest.mark.parametrize(
    ("module", "owner"), [("pyspark", ("transforms",)), ("pysail", ("transforms",)), ("feast", ("features/feast/",))]
)
def test_only_its_owner_imports_a_heavy_library(module: str, owner: tuple[str, ...]) -> None:
    importing = [
        str(file.relative_to(ROOT / "src" / "isthmus"))
        for file in (ROOT / "src" / "isthmus").rglob("*.py")
        if any(
            line.strip().startswith((f"import {module}", f"from {module}")) for line in file.read_text().splitlines()
        )
    ]
    assert importing
    assert all(name.startswith(owner) for name in importing)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            "isthmus.serving.http.app, isthmus.serving.http.server",
            ("feast", "torch", "pyspark", "dagster", "sklearn", "duckdb", "deltalake"),
        ),
        # With pyarrow.dataset comes pandas: most of what starting `isthmus deploy` took.
        (
            "isthmus.orchestration.models.release, isthmus.distill.reports.modelcard, isthmus.distill.reports.page",
            ("feast", "torch", "pyspark", "dagster", "sklearn", "duckdb", "pandas", "redis", "yaml", "pyarrow.dataset"),
        ),
    ],
)
def test_serving_and_deploying_load_no_library_in_vain(modules: str, heavy: tuple[str, ...]) -> None:
    script = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"
