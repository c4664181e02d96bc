"""The README does what it says: its project, its verbs and its lookup are run."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_readme_names_the_two_commands_and_only_what_exists() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target


def test_the_project_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = [match.groups() for match in BLOCK.finditer((ROOT / "README.md").read_text())]
    written = {language: text for language, text in blocks if language in ("toml", "python")}
    (tmp_path / "isthmus.toml").write_text(written["toml"])
    (tmp_path / "definitions.py").write_text(written["python"])
    _payments(tmp_path / "data" / "payments.parquet")
    verbs = next(text for language, text in blocks if language == "sh" and "isthmus apply" in text)
    curl, push = [text.replace("6570", "6599") for _, text in blocks if text.startswith("curl")]
    *steps, serve = verbs.strip().splitlines()
    for step in steps:
        _run(step, tmp_path)
    environment = {**_environment(), "ISTHMUS_SERVER__PORT": "6599"}
    server = subprocess.Popen(["sh", "-c", f"exec {serve}"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    try:
        _await("http://127.0.0.1:6599/readyz")
        answer = json.loads(_run(curl, tmp_path))
        pushed = json.loads(_run(push, tmp_path))
        after = json.loads(_run(curl, tmp_path))
    finally:
        server.terminate()
        _, log = server.communicate(timeout=20)
    assert server.returncode == 0, log
    names = answer["metadata"]["feature_names"]
    columns = dict(zip(names, answer["results"], strict=True))
    assert columns["payments_7d"]["values"] == [2, None]
    assert columns["spent_7d"]["values"] == [30.0, None]
    assert columns["spent_7d"]["statuses"] == ["PRESENT", "NOT_FOUND"]
    assert pushed == {"rows": 1, "written": 1}
    assert [result["values"] for result in after["results"][1:]] == [[3, None], [41.5, None]]


def _payments(path: Path) -> None:
    now = datetime.now(UTC)
    paid = [now - timedelta(days=40), now - timedelta(days=2), now - timedelta(days=1)]
    path.parent.mkdir()
    times = pa.array(paid, pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table({"customer": ["ann"] * 3, "paid_at": times, "amount": [5.0, 10.0, 20.0]}), path)


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _run(command: str, folder: Path) -> str:
    assert shutil.which(command.split()[0], path=_environment()["PATH"]), command
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def _await(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url):  # noqa: S310 - loopback
                return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
