from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from isthmus.features.definition.spec import Source
from isthmus.transforms import engine, sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Read = Callable[[Source], "DataFrame"]


@pytest.fixture(scope="module")
def sail() -> "Iterator[SparkSession]":
    """One session on Sail for the tests of a module."""
    with engine.session("sail") as spark:
        yield spark


@pytest.fixture
def read(sail: "SparkSession", tmp_path: Path) -> Read:
    """Reads a source whose path is relative to the test's folder."""
    return lambda source: sources.read(sail, source, tmp_path, tmp_path / "staging")
