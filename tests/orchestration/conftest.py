import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.build.build import build
from isthmus.orchestration.build.materialize import materialize
from isthmus.orchestration.project import Project
from tests.orchestration import shop as shops
from tests.orchestration.shop import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """A project that nobody has touched."""
    return shops.write(tmp_path / "shop")


@pytest.fixture
def shop_with_helper(tmp_path: Path) -> Shop:
    """The same with a module beside the definitions."""
    return shops.write_with_helper(tmp_path / "shop")


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shop = shops.write(tmp_path_factory.mktemp("template") / "shop")
    project = Project(shop.root)
    apply(project)
    build(project)
    materialize(project)
    return shop.root


@pytest.fixture
def built(_built: Path, tmp_path: Path) -> Shop:
    """A project that is applied, built and materialized."""
    return Shop(Path(shutil.copytree(_built, tmp_path / "shop")))


@pytest.fixture
def project() -> Callable[[Shop], Project]:
    """Opens a project as a new process would."""
    return lambda shop: Project(shop.root)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a browser's runtime is installed, once."""
    return tmp_path_factory.mktemp("cache")
