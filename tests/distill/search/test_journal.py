"""Searches that were killed, run again, or run twice at once."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from isthmus.distill.search.search import JOURNAL
from isthmus.distill.search.trials import Trials
from isthmus.features.errors import (
    DataError,
    DependencyError,
)
from tests.distill.searching import AT_ONCE, searched, students


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.timeout(600)
def test_a_search_that_is_killed_goes_on(few: pa.Table, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = students(searched(whole, few, trials=5))
    units = [one.shape["units"] for one in expected]
    last = max(units.index(one) for one in units)  # that is trained
    with subprocess.Popen(
        [sys.executable, "-m", "tests.distill.searching", str(killed), "5"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        for line in child.stdout:
            if line.startswith(f"student {last + 1} of 5, step 10"):
                child.kill()
                break
    (journal,) = (killed / "search").glob(f"*/{JOURNAL}")
    before = journal.read_bytes()
    assert len(before.splitlines()) == last
    found = students(searched(killed, few, trials=5))
    assert journal.read_bytes().startswith(before)
    (searched(killed, few, trials=5).path / "graphs" / "4.ort").unlink()
    with pytest.raises(DataError, match=r"4\.ort: cannot be read: .*Remove .* to search again"):
        searched(killed, few, trials=6)
    assert [(one.shape, one.precision, one.score, one.bytes) for one in found] == [
        (one.shape, one.precision, one.score, one.bytes) for one in expected
    ]


def test_a_line_that_was_not_finished_is_tried_again(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, trials=2, of=AT_ONCE)
    file, (first, second) = report.path / JOURNAL, students(report)
    whole = file.read_bytes()
    for cut in (1, 20, len(whole) - len(whole.splitlines()[0]) - 1):
        file.write_bytes(whole[:-cut])
        again = students(searched(tmp_path, few, trials=2, of=AT_ONCE))
        assert again[0] == first
        assert (again[1].shape, again[1].precision, again[1].why) == (second.shape, second.precision, second.why)


@pytest.mark.accept
@pytest.mark.parametrize(("old", "new", "words"), [
    (b'"number":0', b'"number":1', r"line 1: has student 1; expected student 0\. Remove the file"),
    (b'"number":0', b'"number"0', r"line 1: cannot be read: JSON is malformed"),
    (b'"failed"', b'"untrue"', r"line 1: cannot be read: Invalid enum value 'untrue'"),
])  # fmt: skip
def test_a_damaged_file_is_said(few: pa.Table, tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    file = searched(tmp_path, few, trials=1, of=AT_ONCE).path / JOURNAL
    file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(DataError, match=words):
        searched(tmp_path, few, trials=1, of=AT_ONCE)


def test_two_do_not_search_at_the_same_place(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, trials=1, of=AT_ONCE)
    with (
        Trials(report.path / JOURNAL).locked(),
        pytest.raises(DependencyError, match="another process runs this search"),
    ):
        searched(tmp_path, few, trials=2, of=AT_ONCE)


def test_a_report_that_is_none_is_written_again(few: pa.Table, tmp_path: Path) -> None:
    file = searched(tmp_path, few, trials=1, of=AT_ONCE).path / "search.json"
    before = file.read_bytes()
    for damaged in (b"", b"[]", b"{}", b'{"tried": null}', b'{"tried": [1]}'):
        file.write_bytes(damaged)
        searched(tmp_path, few, trials=1, of=AT_ONCE)
        assert file.read_bytes() == before
