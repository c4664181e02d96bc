"""A student that learned nothing is stopped, on the command line as in Dagster, by one sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.orchestration import shop

pytestmark = pytest.mark.accept


ISTHMUS = str(Path(sys.executable).with_name("isthmus"))


def _isthmus(*arguments: str, project: Path) -> subprocess.CompletedProcess[str]:
    command = [ISTHMUS, *arguments, "--project", str(project)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_student_below_its_gate_is_neither_packaged_nor_deployed(tmp_path: Path) -> None:
    root = shop.write(tmp_path / "shop").root
    demo = _isthmus("demo", "--json", project=root)
    assert demo.returncode == 1
    assert json.loads(demo.stdout)["error"] == "GateFailed"
    assert "late_order/student: keeps_its_quality" in demo.stderr
    export = _isthmus("model", "export", project=root)
    assert export.returncode == 1
    assert "gate lift_kept failed" in export.stderr
    assert "change the gates" in export.stderr
    assert "Traceback" not in demo.stderr + export.stderr
    assert not list((root / ".isthmus").glob("packages/*"))
    assert not (root / ".isthmus" / "deployment.json").exists()
