"""Tests of the extracted passages and of the definitions."""

from pathlib import Path

import pretrain
import pyarrow.parquet as pq
import pytest
from corpus import cleaned, passages
from texts import texts

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


def test_texts_are_first_paragraphs_and_then_sentences(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "test_numbers.py").write_text(MODULE)
    (tmp_path / "toy" / "site-packages").mkdir()
    (tmp_path / "toy" / "site-packages" / "elsewhere.py").write_text(MODULE.replace("array", "list"))
    found = texts([tmp_path / "toy"]).to_pylist()
    assert [(one["text"], one["first"]) for one in found] == [
        ("Give every number of an array its share.", True),
        ("Nobody outside of the module asks for this function.", True),
        ("Too little to ask.", True),
        ("Each is divided by the sum of all of them, unless that is 0 : then the array comes back just as it was.",
         False),
        ("Whatever it says, however long it may be, is no passage of the corpus at all.", False),
    ]  # fmt: skip
    assert found[3]["question"] == found[0]["text"]


def test_nothing_of_a_question_that_is_tested_is_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numbers.py").write_text(MODULE)
    monkeypatch.setattr(pretrain, "TEXTS", tmp_path / "texts.parquet")
    pq.write_table(texts([tmp_path]), tmp_path / "texts.parquet")
    without = {pretrain.plain("give every number of an array, its share")}
    found = pretrain.chosen(["A question of the training."], without)
    assert found[0] == "A question of the training."
    assert {*found[1:3]} == {"Nobody outside of the module asks for this function.", "Too little to ask."}
    assert found[3:] == ["Whatever it says, however long it may be, is no passage of the corpus at all."]


def test_the_definitions_are_valid() -> None:
    definitions = Project(Path(__file__).parent).definitions
    assert list(definitions.distillations) == ["docsearch"]
