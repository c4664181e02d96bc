import shutil
from pathlib import Path

import pytest

from tests.orchestration.attribution import machines
from tests.orchestration.conftest import once


@pytest.fixture
def unserved(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A project with a package of which nothing was ever materialized."""
    return Path(shutil.copytree(once(tmp_path_factory, "machines", machines.made), tmp_path / "machines"))


@pytest.fixture
def served(unserved: Path) -> Path:
    """The same, materialized as soon as each day had begun."""
    machines.serve(unserved)
    return unserved


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """The project with predictions of two days in its spool; on the first, what was served was a day old."""

    def make(folder: Path) -> None:
        shutil.copytree(once(tmp_path_factory, "machines", machines.made), folder)
        machines.recorded(folder)

    return Path(shutil.copytree(once(tmp_path_factory, "recorded", make), tmp_path / "machines"))
