"""Write the sentences of all installed docstrings to data/texts.parquet: `python texts.py`, after `corpus.py`.

Sources are parsed, never imported. The texts stay on this machine; packages contain only weights trained on them.
"""

import ast
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from corpus import FILE as PASSAGES
from corpus import SPLIT, cleaned

from isthmus.tasks import split_by_value

FILE = Path(__file__).parent / "data" / "texts.parquet"
WORDS = range(3, 33)
PROSE = 0.75  # minimum share of letters and spaces; below it a sentence is a table or a formula
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def sentences(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each sentence of all docstrings in a folder, also of tests, with the docstring's first paragraph."""
    for file in sorted(folder.rglob("*.py")):
        if "site-packages" in file.relative_to(folder).parts:  # inside the standard library; read separately
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escape sequences
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, RecursionError):  # a template, or for another Python version
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _of(ast.get_docstring(node) or "")


def _of(docstring: str) -> Iterator[tuple[str, str]]:
    first, _, rest = docstring.partition("\n\n")
    question = cleaned(first)
    yield question, question
    for paragraph in rest.split("\n\n"):
        if ">>>" not in paragraph:
            for sentence in _END.split(cleaned(paragraph)):
                yield sentence, question


def plain(text: str) -> str:
    """Return lower-case letters and digits, so that punctuation does not distinguish questions."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def held_out(questions: pa.ChunkedArray) -> set[str]:
    """Return the questions of the validation and the test part, normalized by `plain`."""
    parts = split_by_value(questions, SPLIT)
    return {plain(questions[row].as_py()) for row in (*parts.validation, *parts.test)}


def texts(folders: list[Path], without: set[str]) -> pa.Table:
    """Return each text with the length of a question once, but none of a docstring whose question is in `without`."""
    found = dict[str, None]()
    for folder in folders:
        for text, question in sentences(folder):
            prose = sum(letter.isalpha() or letter == " " for letter in text)
            usable = len(text.split()) in WORDS and prose >= PROSE * len(text)
            if usable and plain(question) not in without and plain(text) not in without:
                found[text] = None
    return pa.table({"text": [*found]})


if __name__ == "__main__":
    folders = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))]
    table = texts(folders, held_out(pq.read_table(PASSAGES)["question"]))
    pq.write_table(table, FILE)
    sys.stdout.write(f"{table.num_rows:,} texts in {FILE}\n")
