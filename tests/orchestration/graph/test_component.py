"""The component, written by `dg scaffold defs` into a new Dagster project and loaded by `dg`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.orchestration.shop import Shop, write

COMPONENT = "isthmus.dagster.IsthmusProjectComponent"


def dg(*arguments: str, folder: Path) -> str:
    """What a command prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [str(Path(sys.executable).with_name("dg")), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A Dagster project with nothing in it."""
    folder = tmp_path / "place"
    package = folder / "src" / "place"
    (package / "defs").mkdir(parents=True)
    for one in (package, package / "defs"):
        (one / "__init__.py").write_text("")
    (package / "definitions.py").write_text(
        "from pathlib import Path\nfrom dagster import definitions, load_from_defs_folder\n\n\n"
        "@definitions\ndef defs():\n"
        "    return load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
    )
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "place"\nversion = "0"\n[tool.dg]\ndirectory_type = "project"\n'
        '[tool.dg.project]\nroot_module = "place"\n'
    )
    return folder


@pytest.mark.accept
@pytest.mark.slowest
def test_what_dg_scaffolds_is_the_project_s_graph(place: Path) -> None:
    shop: Shop = write(place / "shop")
    dg("scaffold", "defs", COMPONENT, "features", "--project", shop.root.name, folder=place)
    (written,) = (place / "src").rglob("defs.yaml")
    assert written.parent.name == "features"
    assert "{{ project_root }}/shop" in written.read_text()
    dg("utils", "refresh-defs-state", folder=place)
    keys = {asset["asset_key"] for asset in json.loads(dg("list", "defs", "--json", folder=place))["assets"]}
    assert {"contract", "source/orders", "offline/shelf_demand", "late_order/deployment"} <= keys
