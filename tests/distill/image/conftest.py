"""A project of handwritten digits."""

from pathlib import Path

import pyarrow as pa
import pytest

from tests.distill.image.support import digits


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def table(root: Path) -> pa.Table:
    return digits(root)
