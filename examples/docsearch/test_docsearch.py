"""Tests of the extracted passages and of the definitions."""

from pathlib import Path

import pyarrow as pa
import pytest
from corpus import cleaned, passages
from texts import held_out, texts

from isthmus.project import Project

MODULE = '''
def scaled(x):
    """Give every number of an array its share.

    Each is divided by the sum of :func:`all <numpy.all>` of them, unless that is ``0``: then the array
    comes back just as it was.

    >>> scaled([1, 3])
    """

def _hidden(x):
    """Nobody outside of the module asks for this function.

    Whatever it says, however long it may be, is no passage of the corpus at all.
    """

def short(x):
    """Too little to ask.

    Two words.
    """
'''


def test_a_docstring_is_a_question_and_its_answer(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "numbers.py").write_text(MODULE)
    (tmp_path / "toy" / "test_numbers.py").write_text(MODULE)
    (found,) = passages(tmp_path / "toy")
    assert (found.name, found.package) == ("toy.numbers.scaled", "toy")
    assert found.question == "Give every number of an array its share."
    assert found.text.startswith("Each is divided by the sum of all of them, unless that is 0 : then")
    assert ">>>" not in found.text


def test_markup_is_no_prose() -> None:
    assert cleaned("A ``name``,\n**strong** and :class:`~numpy.ndarray`.") == "A name , strong and numpy.ndarray."


def test_texts_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "test_numbers.py").write_text(MODULE)
    (tmp_path / "toy" / "site-packages").mkdir()
    (tmp_path / "toy" / "site-packages" / "elsewhere.py").write_text(MODULE.replace("array", "list"))
    first = [
        "Give every number of an array its share.",
        "Each is divided by the sum of all of them, unless that is 0 : then the array comes back just as it was.",
    ]
    others = [
        "Nobody outside of the module asks for this function.",
        "Whatever it says, however long it may be, is no passage of the corpus at all.",
        "Too little to ask.",
    ]
    assert texts([tmp_path / "toy"], set())["text"].to_pylist() == [*first, *others]
    assert texts([tmp_path / "toy"], {"give every number of an array its share"})["text"].to_pylist() == others


def test_nothing_of_a_question_that_is_tested_is_learned_from() -> None:
    questions = [f"Question {number}, of many?" for number in range(1000)]
    assert len(held_out(pa.chunked_array([questions]))) == pytest.approx(400, abs=50)


def test_the_definitions_are_valid() -> None:
    definitions = Project(Path(__file__).parent).definitions
    assert list(definitions.distillations) == ["docsearch"]
