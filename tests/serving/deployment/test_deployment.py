from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, GateFailed, IsthmusError, PackageError
from isthmus.features.profiles import ServingProfile
from isthmus.package.manifest import package_digest
from isthmus.package.verdict import FeatureVerdict, Verdict
from isthmus.serving.deployment.record import Approval, Deployment
from isthmus.serving.rollout.releases import deploy
from tests.serving.support import CONTRACT, EVERYTHING, NOW, PUNCTUALITY, TABLES, contract_of, make_package, verdict_of

OTHER = contract_of(PUNCTUALITY, EVERYTHING)
ONE = FeatureVerdict(1, 0, 0.0)


def renamed(contract: Contract, project: str) -> Contract:
    return replace(contract, project=project)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return make_package(tmp_path / "package")


def test_a_deployment_is_written_and_read_back(package: Path, tmp_path: Path) -> None:
    file = tmp_path / "state" / "deployment.json"
    done = deploy(package, verdict_of(package), CONTRACT, ServingProfile(threads=3), file, tables=TABLES, at=NOW)
    deployment, kept = done.deployment, file.parent / "deployments" / package_digest(package)
    assert deployment == Deployment.loads(file.read_bytes(), str(file))
    assert deployment == Deployment(
        model="late", package=str(kept), digest=package_digest(package), contract=CONTRACT.hash, service="late",
        precision="int8", threads=3, deployed_at=NOW, verdict=Approval(at=NOW, compared=30),
    )  # fmt: skip
    assert {entry.name for entry in file.parent.iterdir()} == {"deployment.json", "deployments", "deployments.jsonl"}
    assert [entry.name for entry in kept.parent.iterdir()] == [kept.name]


def refused(package: Path, verdict: Verdict | None, profile: ServingProfile | None = None) -> IsthmusError:
    file = package.parent / "deployment.json"
    with pytest.raises(IsthmusError) as caught:
        deploy(package, verdict, CONTRACT, profile or ServingProfile(), file, tables=TABLES, at=NOW)
    assert not file.exists()
    assert caught.value.remedy
    return caught.value


def test_each_reason_for_refusal_has_its_sentence(package: Path) -> None:
    verdict = verdict_of(package)
    reasons = {
        "no verdict": None,
        "failed: 3 of 30 values": verdict_of(package, differing=1),
        "failed: 0 of 0 values": replace(verdict, views={}, model=replace(verdict.model, compared=0)),  # type: ignore[type-var]
        "did not compare punctuality.late_rate, punctuality.flights": replace(verdict, views={}),
        "did not compare punctuality.late_rate;": replace(
            verdict,
            views={"punctuality": {"flights": FeatureVerdict(1, 0, 0.0), "late_rate": FeatureVerdict(0, 0, 0.0)}},
        ),
        "did not compare punctuality.late_rate, punctuality.fl": replace(verdict, ahead={"punctuality": 11}),
        "tables changed since the verdict: punctuality": replace(verdict, tables={"punctuality": "beef"}),
        "about contract": replace(verdict, contract=OTHER.hash),
        "about package": replace(verdict, package="0" * 64),
        "did not compare model outputs": replace(verdict, package=None, model=None),
    }
    for words, given in reasons.items():
        error = refused(package, given)
        assert isinstance(error, GateFailed)
        assert words in str(error)


def test_a_package_of_a_contract_that_had_less_or_more_elsewhere_is_deployed(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package", OTHER)
    done = deploy(package, verdict_of(package), CONTRACT, ServingProfile(), tmp_path / "d.json", tables=TABLES, at=NOW)
    assert done.deployment.contract == OTHER.hash != CONTRACT.hash, "what the package was made under"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (contract_of(replace(PUNCTUALITY, ttl=None)), "view punctuality: ttl was unlimited, is 1 day"),
        (contract_of(PUNCTUALITY, request=()), "service late: request field distance is new; request field carrier is"),
        (contract_of(replace(PUNCTUALITY, fields=PUNCTUALITY.fields[::-1])), "the order of its features changed"),
        (renamed(OTHER, "trains"), "project trains is now flights"),
    ],
)
def test_a_package_that_reads_what_has_changed_is_refused(tmp_path: Path, changed: Contract, words: str) -> None:
    package = make_package(tmp_path / "package", changed)
    error = refused(package, verdict_of(package))
    assert isinstance(error, ContractMismatch)
    assert words in error.found
    assert "everything" not in error.found, "it does not read that view"


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        (b"{}", "is not a contract"),
        (OTHER.dumps(), f"contract {OTHER.hash[:12]}; expected {CONTRACT.hash[:12]}, as in the manifest"),
    ],
)
def test_a_package_with_another_contract_than_its_own_is_refused(package: Path, contract: bytes, words: str) -> None:
    before = sha256((package / "contract.json").read_bytes()).hexdigest()
    (package / "contract.json").write_bytes(contract)
    sums = package / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(before, sha256(contract).hexdigest()))
    error = refused(package, verdict_of(package))
    assert isinstance(error, PackageError)
    assert words in str(error)


def test_a_damaged_package_is_refused(package: Path) -> None:
    verdict = verdict_of(package)
    model = package / "model.int8.ort"
    model.write_bytes(model.read_bytes()[:-1] + b"\1")
    assert isinstance(refused(package, verdict), PackageError)


def test_a_package_without_the_precision_is_refused(package: Path) -> None:
    error = refused(package, verdict_of(package), ServingProfile(precision="fp32"))
    assert isinstance(error, PackageError)
    assert "fp32" in str(error)


@pytest.mark.parametrize("text", [b"", b"{}", b'{"model": 1}', b'{"later": 1}', b"\xff"])
def test_a_broken_deployment_is_named(text: bytes) -> None:
    with pytest.raises(PackageError, match=r"is not a deployment .*, or the version of Isthmus that wrote it"):
        Deployment.loads(text)
