"""Rules of docs and docstrings that a machine can check. A reader who understands at first sight is the goal."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src" / "isthmus").rglob("*.py"))
OPENS = re.compile(r"(?:Of|By|Where|What|Who|Whoever|That|Whether|Whose)\b")
ENTRY = re.compile(r"^ {4,8}`?\w+`?: (?:of|as|that|by|how|what|whose|where|which|the same)\b", re.MULTILINE)
RIDDLE = re.compile(
    r"(?<!there )\b(?:is|are|was) no (?!longer|more|later|less|greater|larger|better|worse)[a-zA-Z]"
    r"|\b(?:is|are) none\b"
)


def documented(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings of a module with their lines, the strings after assignments included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """The other strings of a module: errors, remedies, help and labels."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


@pytest.mark.parametrize(
    ("texts", "rule"),
    [(documented, OPENS.match), (documented, ENTRY.search), (messages, RIDDLE.search)],
    ids=["a docstring opens with a verb or a noun", "an entry names its subject", "a message is not a riddle"],
)
def test_prose_keeps_the_rules(texts: object, rule: object) -> None:
    assert callable(texts)
    assert callable(rule)
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0][:80]}"
        for path in MODULES
        for line, text in texts(path)
        if text.strip() and rule(text)
    ]
    assert not broken, "\n".join(broken)


def test_the_rules_find_what_they_forbid() -> None:
    assert OPENS.match("Of a rank.")
    assert ENTRY.search("Attributes:\n        rows: of the result.")
    assert RIDDLE.search("the body is no JSON")
    assert not RIDDLE.search("the body is not JSON; no key has this name")
