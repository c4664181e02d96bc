"""Tests of the extracted texts and of the definitions."""

from pathlib import Path

from corpus import Text, descriptions, docstrings, topics

from isthmus.project import Project

MODULE = '''
def scaled(x):
    """Give every number of an array its share.

    Each is divided by the sum of :func:`all <numpy.all>` of them.

    >>> scaled([1, 3])
    """

def _hidden(x):
    """Nobody outside of the module asks for this."""
'''
STATUS = """Package: hello
Status: install ok installed
Description: example package
 The program prints a friendly greeting.
 .
 It allows nonprogrammers to use a classic tool.
Homepage: https://example.org

Package: silent
Status: install ok installed
"""


def test_a_docstring_is_a_text_of_the_domain(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "numbers.py").write_text(MODULE)
    (tmp_path / "toy" / "test_numbers.py").write_text(MODULE)
    said = "Give every number of an array its share. Each is divided by the sum of all of them."
    assert [*docstrings(tmp_path / "toy")] == [Text("toy.numbers.scaled", said, 1)]


def test_a_description_is_a_general_text() -> None:
    said = "example package The program prints a friendly greeting. It allows nonprogrammers to use a classic tool."
    assert [*descriptions(STATUS)] == [Text("hello", said, 0)]


def test_python_describes_its_topics() -> None:
    found = [*topics()]
    assert len(found) > 500
    assert {text.domain for text in found} == {0}


def test_the_definitions_are_valid() -> None:
    definitions = Project(Path(__file__).parent).definitions
    assert list(definitions.distillations) == ["docwriter"]
