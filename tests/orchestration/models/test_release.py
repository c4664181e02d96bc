"""`isthmus deploy rollback`, `isthmus deploy history` and candidates, and what is said of the server of the project."""

import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from isthmus.features.errors import ContractMismatch, GateFailed
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import Float64, String
from isthmus.orchestration.models.release import _await_switch, history, promote, rollback
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import url_host
from isthmus.package.manifest import package_digest
from isthmus.serving.rollout.releases import deploy
from tests.orchestration.shop import Shop
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


@pytest.mark.accept
def test_a_release_and_the_way_back_say_when_the_server_has_switched(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "isthmus.toml").write_text(f'[project]\nname = "flights"\n\n[server]\nport = {port}\n')
    project, state = Project(tmp_path), tmp_path / ".isthmus"
    assert history(project) == []
    with pytest.raises(ContractMismatch, match="nothing has been applied"):
        rollback(project)
    state.mkdir()
    (state / "contract.json").write_bytes(CONTRACT.dumps())
    assert "nothing is deployed" in isthmus(tmp_path, "deploy", "rollback", code=1)["found"]
    assert "the share is 1" in isthmus(tmp_path, "deploy", "canary", "1", code=2)["found"]

    file = project.deployment_file
    put = partial(deploy, contract=CONTRACT, profile=ServingProfile(), file=file, tables=TABLES)
    packages = [make_package(tmp_path / f"package {n}", inputs=INPUTS, weight=n) for n in (1, 2, 3)]
    digests = [package_digest(package) for package in packages]
    for n, package in enumerate(packages):
        put(package, verdict_of(package), at=NOW + n)
    put(packages[0], verdict_of(packages[0]), at=NOW + 3, share=0.5)
    dropped = rollback(project).as_dict()
    nobody = f"no server answers at http://127.0.0.1:{port}; a server at another port switches on its own"
    assert (dropped["digest"], dropped["candidate"], dropped["server"]) == (digests[2], None, nobody)
    put(packages[0], verdict_of(packages[0]), at=NOW + 4, share=0.0)
    with serving(state, "redis://127.0.0.1:1", port=port) as server:
        assert promote(project).as_dict()["server"] == "has switched"
        with pytest.raises(GateFailed, match="has no candidate"):
            promote(project)
        assert rollback(project).deployment.digest == digests[2]
        switched = isthmus(tmp_path, "deploy", "rollback")
        assert (switched["digest"], switched["bytes"], switched["server"]) == (digests[1], 0, "has switched")
        assert set(switched["seconds"]) == {"fetch", "verify", "load", "warm", "switch"}
        answer = server.predict(request={"distance": [1], "carrier": ["UA"]})
        assert answer.json()["package"] == digests[1]
        # The same package again, with another profile.
        again = put(packages[1], verdict_of(packages[1]), at=NOW + 9, profile=ServingProfile(threads=2))
        assert _await_switch(project, again.deployment) == "has switched"
        assert server.http.get("/models").json()["models"][0]["threads"] == 2
    lines = history(project)
    assert [line["action"] for line in reversed(lines)] == [
        "deploy", "deploy", "deploy", "canary", "drop", "shadow", "promote", "rollback", "rollback", "deploy",
    ]  # fmt: skip
    shown = subprocess.run(
        [SCRIPT, "deploy", "history"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[1] for line in shown.splitlines()[3:13]] == [line["action"] for line in lines]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1"])  # noqa: S104 - for a moment
def test_a_server_is_reached_on_whatever_it_listens(host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        url = urlsplit(f"http://{url_host(host)}:{listener.getsockname()[1]}")
        socket.create_connection((url.hostname, url.port), timeout=10).close()


def test_a_device_that_is_missing_here_is_refused_before_anything_is_served(built: Shop) -> None:
    with (built.root / "isthmus.toml").open("a") as settings:
        settings.write('\n[profiles.serving]\ndevice = "cuda"\n')
    for verb in ("verify", "deploy"):
        refusal = isthmus(built.root, verb, code=3)
        assert refusal["found"].startswith('"cuda", but ONNX Runtime'), verb
        assert refusal["remedy"].endswith('or set device = "cpu"')
    done = subprocess.run([SCRIPT, "serve"], cwd=built.root, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
    assert 'device: "cuda", but ONNX Runtime' in done.stderr
