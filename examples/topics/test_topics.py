"""Tests of the corpus and of the definitions."""

from pathlib import Path

import pyarrow.compute as pc
from corpus import SPLIT, Article, articles, corpus

from isthmus.project import Project
from isthmus.tasks import split_by_value

PACKAGES = """Package: hello-player
Source: hello (2.1)
Section: sound

Package: hello-server
Section: httpd

Package: libhello
Section: libs
"""
DESCRIPTIONS = """Package: hello-player
Description-en: plays a friendly greeting
 The program greets with
 sound.
 .
 It is small.

Package: hello-server
Description-en: serves a greeting

Package: libhello
Description-en: a library
"""


def test_sections_with_a_clear_subject_become_topics() -> None:
    assert [*articles(PACKAGES, DESCRIPTIONS)] == [
        Article(
            "hello-player", "hello", "plays a friendly greeting The program greets with sound. It is small.", "sound"
        ),
        Article("hello-server", "hello-server", "serves a greeting", "web"),
    ]


def test_only_some_training_texts_keep_their_topic() -> None:
    found = [Article(f"p{n}", f"s{n // 2}", f"text {n}", ("sound", "web")[n % 2]) for n in range(400)]
    table = corpus([*found, found[0]._replace(name="copy")], labels=50)
    assert table.num_rows == 400
    parts = split_by_value(table["source"], SPLIT)
    assert pc.sum(pc.is_valid(table["topic"].take(parts.train))).as_py() == 50
    assert table["topic"].take(parts.test).null_count == table["topic"].take(parts.validation).null_count == 0


def test_the_definitions_are_valid() -> None:
    definitions = Project(Path(__file__).parent).definitions
    assert list(definitions.distillations) == ["topics"]
