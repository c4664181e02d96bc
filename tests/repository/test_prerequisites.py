"""`make test` needs no program that the README does not name."""

import shutil

import pytest

from tests.conftest import PREREQUISITES
from tests.repository.pages import ROOT


def test_make_test_hides_every_other_program(pytestconfig: pytest.Config) -> None:
    if pytestconfig.option.markexpr != "not accept":
        recipe = (ROOT / "Makefile").read_text().partition("\ntest:")[2].partition("\n\n")[0]
        assert recipe.endswith('$(PYTEST) -m "not accept"')
        return
    assert all(shutil.which(name) for name in PREREQUISITES)
    assert not [name for name in ("chromium", "curl", "initdb", "openssl", "psql", "promtool") if shutil.which(name)]
