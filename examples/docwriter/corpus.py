"""Write docstrings and general texts to data/texts.parquet: `python corpus.py [DOCSTRINGS]`.

The docstrings come from installed packages under the BSD, MIT or Apache license; sources are parsed, never imported.
The general texts are Debian's descriptions of the installed packages, or the topics of Python's `help` (PSF license) on
other systems. This repository contains none of them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "sklearn", "networkx", "sympy", "pyspark")
FILE = Path(__file__).parent / "data" / "texts.parquet"
DEBIAN = Path("/var/lib/dpkg/status")
DOCSTRINGS = 400  # of about 20,000; a teacher of 135 million weights reads them in minutes
WORDS = range(12, 121)  # of a text

_MARKUP = [
    (re.compile(r"^\s*\.\. [\w:-]+::.*$", re.MULTILINE), " "),  # a directive
    (re.compile(r":[\w:]+:`~?\.?([^`<]*?)(?:\s*<[^`]*>)?`"), r"\1"),  # a role
    (re.compile(r"^\s*([-=~*^])\1{2,}\s*$", re.MULTILINE), " "),  # a line under a heading
    (re.compile(r"^\s*(>>>|\.\.\.) .*$", re.MULTILINE), " "),  # an example
    (re.compile(r"`+|\*\*|\|"), " "),
    (re.compile(r"\s+"), " "),
]


class Text(NamedTuple):
    """A text and the name of the object it describes; `domain` is 1 for a docstring."""

    name: str
    text: str
    domain: int


def docstrings(folder: Path) -> Iterator[Text]:
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


def _of(node: ast.AST, path: tuple[str, ...]) -> Iterator[Text]:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and not part.name.startswith("_"):
            name = (*path, part.name)
            yield Text(".".join(name), cleaned(ast.get_docstring(part) or ""), 1)
            yield from _of(part, name)


def descriptions(status: str) -> Iterator[Text]:
    """Yield the descriptions in a status file of Debian's package manager."""
    for paragraph in status.split("\n\n"):
        name = re.search(r"^Package: (.+)$", paragraph, re.MULTILINE)
        description = re.search(r"^Description: (.+(?:\n .*)*)", paragraph, re.MULTILINE)
        if name and description:
            lines = (line.strip() for line in description[1].splitlines())
            yield Text(name[1], cleaned("\n".join("" if line == "." else line for line in lines)), 0)


def topics() -> Iterator[Text]:
    """Yield the paragraphs of the topics of Python's `help`."""
    for topic, text in sorted(import_module("pydoc_data.topics").topics.items()):
        for number, paragraph in enumerate(text.split("\n\n")):
            yield Text(f"{topic} {number}", cleaned(paragraph), 0)


def cleaned(text: str) -> str:
    """Return the text without markup, examples and line breaks, cut to the maximum number of words."""
    for pattern, instead in _MARKUP:
        text = pattern.sub(instead, text)
    return " ".join(text.split()[: WORDS[-1]])


def corpus(count: int = DOCSTRINGS, packages: tuple[str, ...] = PACKAGES) -> pa.Table:
    """Return the texts by name: docstrings and half as many general texts, drawn with a fixed seed.

    Raises:
        SystemExit: a package is not installed.
    """
    found: list[Text] = []
    for name in packages:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"{name} is not installed. Install Isthmus with the extra [all].")
        found += docstrings(Path(spec.submodule_search_locations[0]))
    own = _each_once(found)
    debian = DEBIAN.read_text(encoding="utf-8", errors="replace") if DEBIAN.is_file() else ""
    general = _each_once([*descriptions(debian)] or [*topics()])
    drawn = [*_drawn(own, count), *_drawn(general, count // 2)]
    return pa.Table.from_pylist([text._asdict() for text in sorted(drawn)])


def _drawn(texts: list[Text], count: int) -> list[Text]:
    return [texts[place] for place in np.random.default_rng(0).permutation(len(texts))[:count]]


def _each_once(texts: list[Text]) -> list[Text]:
    """Return the texts of suitable length, without repeated texts or names."""
    names: set[str] = set()
    seen: set[str] = set()
    kept = []
    for text in sorted(texts):
        if len(text.text.split()) in WORDS and text.text not in seen and text.name not in names:
            kept.append(text)
            seen.add(text.text)
            names.add(text.name)
    return kept


if __name__ == "__main__":
    table = corpus(*map(int, sys.argv[1:2]))
    FILE.parent.mkdir(exist_ok=True)
    pq.write_table(table, FILE)
    count = int(pa.compute.sum(table["domain"]).as_py())
    sys.stdout.write(f"{count:,} docstrings and {table.num_rows - count:,} general texts in {FILE}\n")
