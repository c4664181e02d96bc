"""The README does what it says: its project, its verbs and its lookup are run."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.repository.pages import ROOT, Terminal, blocks


def test_the_readme_names_the_two_commands_and_only_what_exists() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target


@pytest.mark.accept
def test_the_project_of_the_readme_runs(tmp_path: Path) -> None:
    run = ("isthmus apply", "curl")
    own = [block for block in blocks("README.md") if block.file or block.text.startswith(run)]
    _payments(tmp_path / "data" / "payments.parquet")
    with Terminal(tmp_path) as terminal:
        *_, answered = [terminal.run(block) for block in own]
    answer = json.loads(answered)
    names = answer["metadata"]["feature_names"]
    columns = dict(zip(names, answer["results"], strict=True))
    assert columns["spent_7d"]["values"] == [30.0, None]
    assert columns["spent_7d"]["statuses"] == ["PRESENT", "NOT_FOUND"]


def _payments(path: Path) -> None:
    now = datetime.now(UTC)
    paid = [now - timedelta(days=40), now - timedelta(days=2), now - timedelta(days=1)]
    path.parent.mkdir()
    times = pa.array(paid, pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table({"customer": ["ann"] * 3, "paid_at": times, "amount": [5.0, 10.0, 20.0]}), path)
