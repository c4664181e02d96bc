"""`make test` needs no program that the README does not name."""

import shutil

import pytest

from tests.conftest import PREREQUISITES
from tests.end_to_end.compilers import PINNED
from tests.repository.pages import ROOT


def test_make_test_hides_every_other_program(pytestconfig: pytest.Config) -> None:
    if pytestconfig.option.markexpr != "not accept":
        recipe = (ROOT / "Makefile").read_text().partition("\ntest:")[2].partition("\n\n")[0]
        assert recipe.endswith('$(PYTEST) -m "not accept"')
        return
    assert all(shutil.which(name) for name in PREREQUISITES)
    assert not [name for name in ("chromium", "curl", "initdb", "openssl", "psql", "promtool") if shutil.which(name)]


def test_the_pins_of_the_kotlin_compiler_are_where_its_tests_look() -> None:
    """A machine with a cached compiler does not read them."""
    assert (PINNED / "package-lock.json").is_file()
