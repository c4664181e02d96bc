import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.web import installed
from isthmus.orchestration.snapshots.create import snapshot
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from tests.orchestration import shop as shops
from tests.orchestration.shop import Shop, learnable, with_device, with_moment, with_owner


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """A project that nobody has touched."""
    return shops.write(tmp_path / "shop")


@pytest.fixture
def shop_with_helper(tmp_path: Path) -> Shop:
    """The same with a module beside the definitions."""
    return shops.write_with_helper(tmp_path / "shop")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that one worker makes for all. Who changes anything there changes a copy."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, made = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            made.touch()
    return folder


def _build(folder: Path) -> None:
    shops.write(folder)
    for step in (apply, build, materialize):
        step(Project(folder))


def _export(folder: Path) -> None:
    shop = learnable(with_moment(shops.write(folder)))
    # Two columns of one type, that could be taken for each other.
    shop.replace('Field("late_rate_7d", Float32)', 'Field("late_rate_7d", Float64)')
    shop.replace('.cast("float").alias("late_rate_7d")', '.alias("late_rate_7d")')
    for step in (apply, build, materialize, training_set, distill, export):
        step(Project(folder))


def _on_device(folder: Path) -> None:
    learnable(with_device(with_moment(shops.write(folder))))
    for step in (apply, build, materialize, snapshot, training_set, distill, export):
        step(Project(folder))


@pytest.fixture
def on_device(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Shop:
    """A project whose student's stored features are kept by devices, with a package and a snapshot."""
    return Shop(Path(shutil.copytree(once(tmp_path_factory, "on-device", _on_device), tmp_path / "shop")))


def _of_owners(folder: Path) -> None:
    learnable(with_owner(with_device(with_moment(shops.write(folder)))))
    for step in (apply, build, materialize, snapshot, training_set, distill, export):
        step(Project(folder))


@pytest.fixture
def of_owners(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Shop:
    """The same, where each customer has a snapshot of their own."""
    return Shop(Path(shutil.copytree(once(tmp_path_factory, "of-owners", _of_owners), tmp_path / "shop")))


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Shop:
    """A project that is applied, built and materialized."""
    return Shop(Path(shutil.copytree(once(tmp_path_factory, "built", _build), tmp_path / "shop")))


@pytest.fixture
def exported(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Shop:
    """A project with a request transform, from its sources to a package."""
    return Shop(Path(shutil.copytree(once(tmp_path_factory, "exported", _export), tmp_path / "shop")))


@pytest.fixture
def project() -> Callable[[Shop], Project]:
    """Opens a project as a new process would."""
    return lambda shop: Project(shop.root)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a browser's runtime is installed, by one worker for all."""
    return once(tmp_path_factory, "cache", lambda folder: installed(folder / "isthmus")) / "isthmus"
