"""What a terminal of 80 columns shows."""

import re

import pytest

from isthmus.features.document.blocks import (
    Block,
    Bullets,
    Fields,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    aside,
    bad,
    cell,
    code,
    decimal,
    plain,
)
from isthmus.features.document.html import to_html
from isthmus.features.projectstatus import ProjectStatus, RunStatus
from isthmus.orchestration.cli.screens.terminal import progress
from isthmus.orchestration.cli.screens.writer import show

MODELS = ["teacher", "reference", "student", "control"]
WITH_INTERVALS: list[list[Text]] = [
    ["auc", "0.7486", "0.7315", ("0.7410", aside("0.7397 to 0.7423")), ("0.7390", aside("0.7386 to 0.7394"))],
    ["agreement with teacher", "-", "-", "0.9468", "0.9450"],
]
MANY = ["features", "compared", "equal", "differing", "largest difference", "tolerance"]
STATUS = ProjectStatus(
    project="shop", contract="c" * 64, applied=True, now=0, views={}, models={}, measured=True, found_at=60_000_000,
    runs=[RunStatus(id="1" * 32, made="everything", status=state, at=0) for state in ("started", "success")],
)  # fmt: skip
DOCUMENTS: dict[str, list[Block]] = {
    "intervals": [TableBlock(["", *MODELS], WITH_INTERVALS, numbers=MODELS)],
    "columns": [TableBlock(["", *MANY], [["snapshot destination_punctuality", *(["1,964,076"] * 6)]], numbers=MANY)],
    "words": [
        TableBlock(
            ["view", "rows", "last day", "built", "online since", "state"],
            [["destination_punctuality", "306,295", "2013-12-30, today", "2026-11-28 14:56", "2013-12-30 18:00",
              bad("to be built again, to be materialized")]],
            numbers=["rows"],
        ),
    ],
    "hashes": [TableBlock(["file", "sum", "of"], [["model.ort", "a" * 30, "b" * 30]], code=["sum", "of"])],
    "long name": [TableBlock(["feature", "value"], [["v" * 50 + "__" + "f" * 40, "1"]], numbers=["value"])],
    "text": [
        Paragraph("The teacher is worth 0.0020 auc to the student (0.000866 to 0.0031), against the same without it."),
        Bullets([(code("auc"), ": area under the ROC curve, the chance that a row of class 1 scores above one of 0")]),
        Fields([("remedy", "make the student smaller, allow more memory, or measure on a machine that does no more")]),
    ],
    "status": [*STATUS.screen()],
}  # fmt: skip


def words(block: Block) -> list[str]:
    match block:
        case TableBlock():
            cells: list[Text] = [each for row in (block.columns, *block.rows) for each in row]
            texts = [" ".join(map(plain, each)) if isinstance(each, tuple) else plain(each) for each in cells]
            return " ".join(texts).split()
        case Paragraph(text):
            return plain(text).split()
        case Bullets(items):
            return [word for item in items for word in plain(item).split()]
        case Fields(rows):
            return [word for name, value in rows for word in (name, *plain(value).split())]
    raise AssertionError(block)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("columns", [80, 120])
def test_a_screen_is_as_wide_as_the_terminal_and_cuts_no_word(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    show(DOCUMENTS[name])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    # An interval behind a number has parentheses, one below it has none.
    whole = set(shown.split()) | set(re.sub("[()]", " ", shown).split())
    cut = [word for block in DOCUMENTS[name] for word in words(block) if word not in whole and len(word) < 56]
    assert cut == []


def test_models_stand_side_by_side_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show(DOCUMENTS["intervals"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "reference" in line] == [MODELS]
    below = next(n for n, line in enumerate(lines) if " auc " in line) + 1
    assert lines[below].split() == ["0.7397", "to", "0.7423", "0.7386", "to", "0.7394"]


def test_text_that_is_piped_has_a_line_for_each_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show([Paragraph("word " * 60)])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_no_bar_has_the_color_of_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with progress() as told:
        told("compared int8", 0.85)
    shown = capsys.readouterr().err
    assert "compared int8" in shown
    colors = set(re.findall(r"\x1b\[([\d;]+)m", shown))
    assert colors
    assert not {color for color in colors if "249;38;114" in color or color in ("31", "91")}


def test_a_run_that_had_not_ended_says_when_that_was() -> None:
    table = next(block for block in STATUS.blocks() if isinstance(block, TableBlock) and block.columns[0] == "run")
    assert [plain(row[2]) for row in table.rows] == ["started at 1970-01-01 00:01", "success"]


def test_pages_show_code_and_link_to_their_sections() -> None:
    sections: list[Block] = [Heading(name) for name in ("One", "Two & three", "Four", "Five")]
    state = TableBlock(["state"], [[bad("run `isthmus build`")]])
    page = to_html("x", [Paragraph("run `isthmus apply <x>`"), *sections, state])
    assert "`" not in page
    assert "<code>isthmus apply &lt;x&gt;</code>" in page
    assert '<a href="#two-three">Two &amp; three</a>' in page
    assert '<h2 id="two-three">' in page
    # What a user's value holds stays as it is.
    assert ">a `b`</td>" in to_html("x", [TableBlock(["v"], [["a `b`"]])])


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1e-05, "0.00001"), (7.3e-05, "0.000073"), (12345.6, "12,346"), (0.25, "0.25"), (3e-12, "3e-12"), (0.0, "0")],
)
def test_numbers_have_no_exponents(value: float, shown: str) -> None:
    assert decimal(value) == cell(value) == shown
    assert decimal(-value, sign="+") == (f"-{shown}" if value else "-0")
