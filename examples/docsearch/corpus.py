"""Write the docstrings of the installed scientific packages to data/docstrings.parquet: `python corpus.py`.

Sources are parsed, never imported, so the result does not depend on a GPU, a display or a JVM.
"""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "sklearn", "networkx", "sympy", "pyspark", "torch")
FILE = Path(__file__).parent / "data" / "docstrings.parquet"
SPLIT = (0.6, 0.04, 0.36)  # of the questions: training, validation, test
WORDS = range(4, 33)  # of a question
LEAST, MOST = 12, 80  # words of a passage; the models read no more

_MARKUP = [
    (re.compile(r"^\s*\.\. [\w:-]+::.*$", re.MULTILINE), " "),  # a directive
    (re.compile(r":[\w:]+:`~?\.?([^`<]*?)(?:\s*<[^`]*>)?`"), r"\1"),  # a role
    (re.compile(r"^\s*([-=~*^])\1{2,}\s*$", re.MULTILINE), " "),  # a line under a heading
    (re.compile(r"^\s*(>>>|\.\.\.) .*$", re.MULTILINE), " "),  # an example
    (re.compile(r"`+|\*\*|\|"), " "),
    (re.compile(r"\s+"), " "),
]


class Passage(NamedTuple):
    """A docstring: the first paragraph is the question, the remaining text is the answer."""

    name: str
    package: str
    question: str
    text: str


def passages(folder: Path) -> Iterator[Passage]:
    """Yield the docstrings in a package folder by file and line, without tests and private names."""
    for file in sorted(folder.rglob("*.py")):
        place = file.relative_to(folder.parent).with_suffix("").parts
        module = place[:-1] if place[-1] == "__init__" else place
        if not any(part.startswith(("test", "conftest")) for part in module):
            try:
                tree = ast.parse(file.read_bytes())
            except SyntaxError:  # a template, or for another Python version
                continue
            yield from _of(tree, module)


def _of(node: ast.AST, path: tuple[str, ...]) -> Iterator[Passage]:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and not part.name.startswith("_"):
            name = (*path, part.name)
            first, _, rest = (ast.get_docstring(part) or "").partition("\n\n")
            question, text = cleaned(first), " ".join(cleaned(rest).split()[:MOST])
            if len(question.split()) in WORDS and len(text.split()) >= LEAST:
                yield Passage(".".join(name), path[0], question, text)
            yield from _of(part, name)


def cleaned(text: str) -> str:
    """Return the text without markup, examples and line breaks."""
    for pattern, instead in _MARKUP:
        text = pattern.sub(instead, text)
    return text.strip()


def corpus(packages: tuple[str, ...] = PACKAGES) -> pa.Table:
    """Return all passages by name; of passages with equal text or equal name, only the first.

    Raises:
        SystemExit: a package is not installed.
    """
    found: list[Passage] = []
    for name in packages:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"{name} is not installed. Install Isthmus with the extra [all].")
        found += passages(Path(spec.submodule_search_locations[0]))
    texts: set[str] = set()
    names: set[str] = set()
    kept = []
    for one in sorted(found):
        if one.text not in texts and one.name not in names:
            kept.append(one)
            texts.add(one.text)
            names.add(one.name)
    return pa.Table.from_pylist([one._asdict() for one in kept])


if __name__ == "__main__":
    table = corpus()
    FILE.parent.mkdir(exist_ok=True)
    pq.write_table(table, FILE)
    sys.stdout.write(f"{table.num_rows:,} passages in {FILE}\n")
