"""`isthmus rollback` and `isthmus history`, and what they say of the server of the project."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from isthmus.features.manifest import package_digest
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import Float64, String
from isthmus.serving.rollout import deploy
from tests.serving.support import CONTRACT, NOW, TABLES, free_port, make_package, serving, verdict_of

SCRIPT = Path(sys.executable).with_name("isthmus")
INPUTS = [("distance", Float64), ("carrier", String)]


def isthmus(root: Path, *arguments: str, code: int = 0) -> Any:
    done = subprocess.run(
        [SCRIPT, *arguments, "--json"], cwd=root, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (1 if code else 0), "one sentence"
    return json.loads(done.stdout)


def test_a_rollback_says_when_the_server_has_switched(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "isthmus.toml").write_text(f'[project]\nname = "flights"\n\n[server]\nport = {port}\n')
    assert isthmus(tmp_path, "history") == []
    assert "isthmus apply" in isthmus(tmp_path, "rollback", code=1)["remedy"]
    state = tmp_path / ".isthmus"
    state.mkdir(exist_ok=True)
    (state / "contract.json").write_bytes(CONTRACT.dumps())
    assert "nothing is deployed" in isthmus(tmp_path, "rollback", code=1)["found"]

    digests = []
    for n in (1, 2, 3):
        package = make_package(tmp_path / f"package {n}", inputs=INPUTS, weight=n)
        digests.append(package_digest(package))
        file = state / "deployment.json"
        deploy(package, verdict_of(package), CONTRACT, ServingProfile(), file, tables=TABLES, at=NOW + n)
    alone = isthmus(tmp_path, "rollback")
    assert (alone["digest"], alone["bytes"], alone["server"]) == (digests[1], 0, "none answers here")
    with serving(state, "redis://127.0.0.1:1", port=port) as server:
        switched = isthmus(tmp_path, "rollback")
        assert (switched["digest"], switched["server"]) == (digests[0], "has switched")
        assert set(switched["seconds"]) == {"fetch", "verify", "load", "warm", "switch"}
        answer = server.predict(request={"distance": [1], "carrier": ["UA"]})
        assert answer.json()["package"] == digests[0]
    assert "there is no deployment before" in isthmus(tmp_path, "rollback", code=1)["found"]
    lines = isthmus(tmp_path, "history")
    assert [line["digest"] for line in lines] == [digests[0], digests[1], *reversed(digests)]
    shown = subprocess.run([SCRIPT, "history"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in shown.splitlines()[3:8]] == ["rollback"] * 2 + ["deploy"] * 3
