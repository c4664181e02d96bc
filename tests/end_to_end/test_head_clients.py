"""The readers of heads for Android and iOS, compiled: held to the cases of all readers, and to ten thousand rows."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from isthmus.package.clients import FOLDER
from isthmus.transforms.rowwise.core.expressions import traced
from tests.distill.tabular.test_head import Flights, lines
from tests.end_to_end.compilers import Command, kotlin, swift
from tests.package.featurizer import cases
from tests.transforms.request.test_heads import ROWS, Portion, drawn, exact

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[kotlin, swift])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Command:
    made: Command = request.param(
        tmp_path_factory.mktemp("head"), FOLDER / "Head", Path(cases.__file__).parent
    )  # fmt: skip
    return made


def _answered(command: Command, file: Path) -> tuple[int, str]:
    done = subprocess.run([*command, file], capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout.splitlines() or [done.stderr])[-1]


def _written(rows: Iterable[str], folder: Path) -> Path:
    file = folder / "rows.txt"
    with file.open("w", encoding="ascii") as content:
        content.writelines(f"{row}\n" for row in rows)
    return file


def test_it_answers_in_all_cases_as_the_other_readers(command: Command, tmp_path: Path) -> None:
    content = cases.FILE.read_text(encoding="ascii")
    count = len(content.splitlines()) - 2
    assert _answered(command, cases.FILE) == (0, f"{count} passed, 0 failed")
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(content.replace(" 0\n", " 1\n", 3))
    assert _answered(command, wrong) == (1, f"{count - 3} passed, 3 failed")


@pytest.mark.slowest
def test_it_computes_all_functions_in_ten_thousand_rows(command: Command, tmp_path: Path) -> None:
    with traced():
        portion = Portion(exact())
    file = _written(portion.lines(drawn(ROWS, 1)), tmp_path)
    assert _answered(command, file) == (0, f"{ROWS} passed, 0 failed")


def test_it_feeds_the_core_of_a_student_in_ten_thousand_rows(command: Command, tmp_path: Path) -> None:
    assert _answered(command, _written(lines(Flights(), ROWS), tmp_path)) == (0, f"{ROWS} passed, 0 failed")
