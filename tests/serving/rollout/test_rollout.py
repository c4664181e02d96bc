"""The cache, the history and the way back: what is in force at every moment, whoever is killed when."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, DataError, DependencyError, GateFailed, PackageError
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import Int64
from isthmus.package.manifest import package_digest, read_package
from isthmus.serving.deployment.history import DeploymentHistory
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.rollout import releases
from isthmus.serving.rollout.releases import CACHED, STAGES, Rollout
from tests.serving.support import (
    CONTRACT,
    EVERYTHING,
    HOUR,
    NOW,
    PUNCTUALITY,
    TABLES,
    contract_of,
    make_package,
    verdict_of,
)

INPUTS = [("punctuality__flights", Int64)]


def made(folder: Path, number: int) -> Path:
    return make_package(folder / f"package {number}", inputs=INPUTS, weight=float(number))


def deploy(package: Path, file: Path, at: int = NOW) -> Rollout:
    return releases.deploy(
        package, verdict_of(package), CONTRACT, ServingProfile(), file, tables=TABLES, at=at, why="a test"
    )


def back(file: Path, to: str | None = None, contract: Contract = CONTRACT) -> Rollout:
    return releases.rollback(file, Generations(contract), at=NOW, to=to)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "deployment.json"


def in_force(file: Path) -> str:
    """The digest of what a server would take up, whose package must be whole."""
    deployment = Deployment.loads(file.read_bytes(), str(file))
    read_package(Path(deployment.package))
    assert package_digest(Path(deployment.package)) == deployment.digest
    return deployment.digest


def kept(file: Path) -> set[str]:
    return {entry.name for entry in (file.parent / "deployments").iterdir()}


def test_a_package_moves_once_and_every_stage_is_timed(tmp_path: Path, file: Path) -> None:
    package = made(tmp_path, 1)
    first = deploy(package, file)
    assert first.bytes == sum(entry.stat().st_size for entry in package.iterdir())
    assert tuple(first.seconds) == STAGES
    assert all(taken > 0 for taken in first.seconds.values())
    second = deploy(package, file)
    assert (second.bytes, second.seconds["fetch"]) == (0, 0)
    damaged = Path(second.deployment.package) / "golden.json"
    damaged.write_bytes(b"{}")
    assert deploy(package, file).bytes == first.bytes
    assert in_force(file) == package_digest(package)
    assert kept(file) == {package_digest(package)}


def test_what_cannot_be_loaded_never_becomes_the_deployment(tmp_path: Path, file: Path) -> None:
    good, bad = made(tmp_path, 1), make_package(tmp_path / "bad", inputs=INPUTS, shift=0.5)
    deploy(good, file)
    with pytest.raises(PackageError, match="does not reproduce"):
        deploy(bad, file)
    assert in_force(file) == package_digest(good)
    assert [event.deployment.digest for event in DeploymentHistory(file).read()] == [package_digest(good)]


def test_a_history_of_one_is_no_choice(tmp_path: Path, file: Path) -> None:
    with pytest.raises(GateFailed, match=r"begins with 'xyz'; expected a deployment; nothing was ever deployed\. See"):
        back(file, "xyz")
    package = made(tmp_path, 0)
    deploy(package, file, NOW)
    with pytest.raises(GateFailed, match=rf"begins with 'xyz'; expected {package_digest(package)[:12]}\. See"):
        back(file, "xyz")


def test_a_rollback_goes_back_one_by_one(tmp_path: Path, file: Path) -> None:
    packages = [made(tmp_path, n) for n in range(3)]
    digests = [package_digest(package) for package in packages]
    for n, package in enumerate(packages):
        deploy(package, file, NOW + n)
    assert back(file).deployment.digest == in_force(file) == digests[1]
    assert back(file).deployment.digest == in_force(file) == digests[0]
    with pytest.raises(GateFailed, match="no deployment before package"):
        back(file)
    assert back(file, digests[2][:20]).deployment.digest == in_force(file) == digests[2]
    assert back(file).deployment.digest == digests[0], "where it came from"
    with pytest.raises(GateFailed, match="is already in force"):
        back(file, digests[0])
    with pytest.raises(GateFailed, match="no package of the history begins with 'xyz'"):
        back(file, "xyz")
    with pytest.raises(GateFailed, match="3 packages of the history begin with ''"):
        back(file, "")
    events = [event.as_dict() for event in DeploymentHistory(file).read()]
    assert [event["action"] for event in events] == ["deploy"] * 3 + ["rollback"] * 4
    assert events[0] == {
        "at": NOW, "action": "deploy", "model": "late", "digest": digests[0], "contract": CONTRACT.hash,
        "precision": "int8", "why": "a test",
    }  # fmt: skip
    assert events[3]["why"] == f"from {digests[2][:12]}"


def test_a_rollback_without_history_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(GateFailed, match="nothing is deployed; expected a deployment to go back from"):
        back(file)
    deploy(made(tmp_path, 1), file)
    with pytest.raises(GateFailed, match="no deployment before"):
        back(file)


def test_what_is_gone_back_to_is_verified_anew(tmp_path: Path, file: Path) -> None:
    first, second = made(tmp_path, 1), made(tmp_path, 2)
    folder = Path(deploy(first, file).deployment.package)
    deploy(second, file)
    with pytest.raises(ContractMismatch, match="ttl was 1 day, is 1 hour"):
        back(file, contract=contract_of(replace(PUNCTUALITY, ttl=HOUR), EVERYTHING))
    (folder / "golden.json").write_bytes(b"{}")
    with pytest.raises(PackageError, match="SHA-256"):
        back(file)
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()
    with pytest.raises(PackageError, match="is no longer in"):
        back(file)
    assert in_force(file) == package_digest(second)


def test_the_cache_has_what_the_last_lines_name(tmp_path: Path, file: Path) -> None:
    packages = [made(tmp_path, n) for n in range(CACHED + 2)]
    for package in packages:
        deploy(package, file)
    assert kept(file) == {package_digest(package) for package in packages[-CACHED:]}


def test_two_deployments_at_once_are_refused(tmp_path: Path, file: Path) -> None:
    package = made(tmp_path, 1)
    deploy(package, file)
    with DeploymentHistory(file).locked():
        with pytest.raises(DependencyError, match="another deployment is in progress here") as caught:
            deploy(package, file)
        assert caught.value.exit_code == 3
        with pytest.raises(DependencyError, match="another deployment is in progress here"):
            back(file)
    deploy(package, file)


def test_a_torn_line_is_dropped_and_a_broken_one_named(tmp_path: Path, file: Path) -> None:
    deploy(made(tmp_path, 1), file)
    lines = file.with_name("deployments.jsonl")
    with lines.open("ab") as torn:
        torn.write(b'{"at": 1, "act')
    assert len(DeploymentHistory(file).read()) == 1
    deploy(made(tmp_path, 2), file)
    assert [event.action for event in DeploymentHistory(file).read()] == ["deploy", "deploy"]
    lines.write_bytes(b"[]\n" + lines.read_bytes())
    with pytest.raises(DataError, match=r"deployments.jsonl, line 1: cannot be read"):
        back(file)
    lines.unlink()
    lines.mkdir()
    with pytest.raises(DataError, match=r"deployments.jsonl: cannot be read \(Is a directory\)"):
        DeploymentHistory(file).read()


def test_a_damaged_deployment_file_is_said_and_the_way_back_is_there(tmp_path: Path, file: Path) -> None:
    package = made(tmp_path, 1)
    deploy(package, file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(
        PackageError, match=r"deployment.json: is not a deployment \(.*truncated\). Run `isthmus deploy`"
    ):
        back(file)
    with pytest.raises(PackageError, match=r"deployment.json: is not a deployment"):
        releases.promote(file, Generations(CONTRACT), at=NOW)
    back(file, package_digest(package))
    assert in_force(file) == package_digest(package)


KILLED = """
import os, signal, sys
from pathlib import Path
from isthmus.features import files
from isthmus.serving.deployment import cache, history
from isthmus.serving.rollout import releases
from isthmus.features.profiles import ServingProfile
from tests.serving.support import CONTRACT, NOW, TABLES, verdict_of

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

step, package, file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
owner, name = {
    "fetch": (cache.shutil, "copyfile"), "verify": (cache, "require"), "load": (releases.Rollout, "load"),
    "switch": (releases, "write_atomically"), "history": (history.DeploymentHistory, "add"),
}[step]
if step == "verify":
    # What is asked of the cache first is refused; the copy is asked next.
    whole, calls = cache.require, []
    def kill_second(*args):
        calls.append(args)
        kill() if len(calls) == 2 else whole(*args)
    cache.require = kill_second
else:
    setattr(owner, name, kill)
releases.deploy(package, verdict_of(package), CONTRACT, ServingProfile(), file, tables=TABLES, at=NOW + 1)
"""


@pytest.mark.parametrize("step", ["fetch", "verify", "load", "switch", "history"])
def test_a_run_that_is_killed_leaves_one_of_the_two(tmp_path: Path, file: Path, step: str) -> None:
    first, second = made(tmp_path, 1), made(tmp_path, 2)
    deploy(first, file)
    done = subprocess.run([sys.executable, "-c", KILLED, step, second, file], check=False, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert in_force(file) == package_digest(second if step == "history" else first)
    if step == "history":
        # The next command finds what was not noted, and the way back is there.
        assert back(file).deployment.digest == package_digest(first)
        assert [event.why for event in DeploymentHistory(file).read()][1] == "found in force"
    else:
        assert deploy(second, file).deployment.digest == in_force(file)
    assert kept(file) == {package_digest(first), package_digest(second)}, "nothing of the killed one is left"


def test_a_copied_project_has_its_own_packages(tmp_path: Path) -> None:
    file = tmp_path / "state" / "deployment.json"
    packages = [make_package(tmp_path / name, weight=weight) for name, weight in (("first", 1.0), ("second", 2.0))]
    deploy(packages[0], file)
    second = deploy(packages[1], file).deployment
    assert str(tmp_path) not in file.read_text() + file.with_name("deployments.jsonl").read_text()
    copied = Path(shutil.copytree(file.parent, tmp_path / "copied")) / "deployment.json"
    shutil.rmtree(file.parent)
    assert in_force(copied) == second.digest
    earlier = back(copied).deployment
    assert Path(earlier.package) == copied.parent / "deployments" / package_digest(packages[0])
    assert in_force(copied) == earlier.digest


@pytest.mark.parametrize("share", [None, 0.5])  # the first with the deployment before, for the time of its probation
def test_whole_paths_of_earlier_versions_lead_to_the_own_packages_of_a_copy(
    tmp_path: Path, share: float | None
) -> None:
    file = tmp_path / "state" / "deployment.json"
    packages = [make_package(tmp_path / name, weight=weight) for name, weight in (("first", 1.0), ("second", 2.0))]
    deploy(packages[0], file)
    releases.deploy(
        packages[1], verdict_of(packages[1]), CONTRACT, ServingProfile(), file, tables=TABLES, at=NOW, share=share
    )
    for written in (file, file.with_name("deployments.jsonl")):
        written.write_text(written.read_text().replace('"deployments/', f'"{file.parent}/deployments/'))
    copied = Path(shutil.copytree(file.parent, tmp_path / "copied")) / "deployment.json"
    current = Deployment.loads(copied.read_bytes(), str(copied))
    assert len(current.to_load(NOW)) == 2
    every = [*current.to_load(NOW), *(event.deployment for event in DeploymentHistory(copied).read())]
    assert {Path(deployment.package).parent for deployment in every} == {copied.parent / "deployments"}
    assert in_force(copied) == current.digest
    earlier = back(copied, to=package_digest(packages[0])).deployment if share is None else current
    assert Path(earlier.package).parent == copied.parent / "deployments"


def test_a_package_that_only_the_original_has_is_served_from_there(tmp_path: Path) -> None:
    file = tmp_path / "state" / "deployment.json"
    deployment = deploy(make_package(tmp_path / "package"), file).deployment
    file.write_text(file.read_text().replace('"deployments/', f'"{file.parent}/deployments/'))
    copied = Path(shutil.copy(file, tmp_path))
    assert Deployment.loads(copied.read_bytes(), str(copied)) == deployment
    second = make_package(tmp_path / "second", weight=2.0)
    releases.deploy(second, verdict_of(second), CONTRACT, ServingProfile(), copied, tables=TABLES, at=NOW, share=0.5)
    assert Deployment.loads(copied.read_bytes(), str(copied)).without_trials == deployment
    assert {event.deployment.package for event in DeploymentHistory(copied).read()} >= {deployment.package}
