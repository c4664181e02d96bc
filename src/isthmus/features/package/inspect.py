"""What can be said of a package without anything else: that it is whole, consistent, signed, and answers as recorded.

It stands on what a serving host has. What it cannot see is a package that was altered with its golden cases and its
manifest, so that all of it fits together again: that a signature is for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from isthmus.features.contract.contract import Contract
from isthmus.features.errors import PackageError
from isthmus.features.package.checksums import CONTRACT, GOLDEN, REMEDY, SIGNATURE
from isthmus.features.package.golden import Golden, read_golden
from isthmus.features.package.manifest import Manifest, Variant, package_digest, read_contract, read_package
from isthmus.features.package.replay import (
    GOLDEN_TOLERANCE,
    Answers,
    answers,
    open_session,
    require_fed,
    require_reproduced,
)
from isthmus.features.package.signature import key_name, require_signature

T = TypeVar("T")


class Runtime(Protocol):
    """What runs model files.

    Attributes:
        name: what it is called.
        tolerance: how far a file's answers may be from what is recorded of it.
    """

    name: str
    tolerance: float

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        """The model files that it can run."""

    def ask(self, folder: Path, manifest: Manifest, variant: Variant, golden: Golden) -> Sequence[Answers]:
        """A file's answers in the golden cases.

        Raises:
            PackageError: its graph is not the one of the manifest, or it does not run.
            DependencyError: the runtime is not there.
        """


class OnnxRuntime:
    """ONNX Runtime in this process, on one thread."""

    name = "ONNX Runtime"
    tolerance = GOLDEN_TOLERANCE

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        """Those in ONNX and ORT format."""
        return [variant for variant in manifest.variants if variant.format != "pte"]

    def ask(self, folder: Path, manifest: Manifest, variant: Variant, golden: Golden) -> Sequence[Answers]:
        """A file's answers in the golden cases."""
        session = open_session(folder, manifest, variant, 1)
        return answers(session, manifest, variant, [case.feeds for case in golden.cases])


@dataclass(frozen=True)
class Check:
    """One question to a package.

    Attributes:
        subject: what was looked at.
        finding: what it showed.
        error: why the package is refused; None if it is not.
    """

    subject: str
    finding: str
    error: PackageError | None = None

    def as_dict(self) -> dict[str, Any]:
        """The check as plain data."""
        return {"check": self.subject, "passed": self.error is None, "found": self.finding}


@dataclass(frozen=True)
class Inspection:
    """All that was asked of a package.

    Attributes:
        package: its folder.
        digest: of the package; empty if its files are not as its sums say.
        checks: in order. What stands on a check that failed was not asked.
        worst: largest difference from the recorded outputs, per model file that passed.
    """

    package: Path
    digest: str
    checks: Sequence[Check]
    worst: Mapping[str, float]

    def require(self) -> None:
        """Passes over a package that is sound.

        Raises:
            PackageError: the first reason why it is not.
        """
        for check in self.checks:
            if check.error is not None:
                raise check.error

    def as_dict(self) -> dict[str, Any]:
        """The inspection as plain data."""
        return {
            "package": str(self.package),
            "digest": self.digest,
            "passed": all(check.error is None for check in self.checks),
            "checks": [check.as_dict() for check in self.checks],
            "worst": dict(self.worst),
        }


def inspect(package: Path, *, key: str | None = None, runtime: Runtime | None = None) -> Inspection:
    """Asks a package everything that it can be asked.

    Args:
        package: its folder.
        key: a public key, as PEM, whose owner must have signed it.
        runtime: what runs the model files; by default ONNX Runtime in this process.

    Raises:
        DependencyError: what is needed to ask is not installed.
    """
    runner = runtime or OnnxRuntime()
    checks: list[Check] = []
    worst: dict[str, float] = {}

    def ask(subject: str, question: Callable[[], tuple[T, str]]) -> T | None:
        try:
            answer, found = question()
        except PackageError as error:
            checks.append(Check(subject, error.found, error))
            return None
        checks.append(Check(subject, found))
        return answer

    manifest = ask("files and manifest", lambda: _whole(package))
    if manifest is None:
        return Inspection(package, "", checks, worst)
    ask(SIGNATURE, lambda: _signed(package, key))
    if checks[-1].error is not None:
        # A runtime opens nothing of whoever is not trusted.
        return Inspection(package, package_digest(package), checks, worst)
    ask(CONTRACT, lambda: _contract(package, manifest))
    golden = ask(GOLDEN, lambda: _golden(package, manifest))
    if golden is not None:
        files = runner.files(manifest)
        if not files:
            ask("model files", lambda: _none(package, manifest, runner))
        for variant in manifest.variants:
            if variant not in files:
                checks.append(Check(variant.file, f"not asked: in {variant.format} format, and not for {runner.name}"))
                continue
            apart = ask(variant.file, partial(_model, package, manifest, variant, golden, runner))
            if apart is not None:
                worst[variant.file] = apart
    return Inspection(package, package_digest(package), checks, worst)


def _whole(package: Path) -> tuple[Manifest, str]:
    manifest = read_package(package)
    return manifest, f"as their sums say: {manifest.name}, student {manifest.model}"


def _signed(package: Path, key: str | None) -> tuple[None, str]:
    if key is None:
        return None, "there is one, and no key to check it" if (package / SIGNATURE).exists() else "not asked for"
    require_signature(package, key)
    return None, f"by key {key_name(key)}"


def _contract(package: Path, manifest: Manifest) -> tuple[Contract, str]:
    contract = read_contract(package, manifest)
    known = {
        column.name: column.dtype
        for column in chain(*(of(manifest.service) for of in (contract.inputs, contract.raw_inputs)))
    }
    for item in manifest.model_inputs:
        if known.get(item.name) != item.dtype:
            declared = known.get(item.name)
            raise PackageError(
                str(package / CONTRACT), f"{item.name} is {declared}" if declared else f"has no {item.name}",
                expected=f"{item.name} of type {item.dtype}, as in the manifest", remedy=REMEDY,
            )  # fmt: skip
    return contract, f"{contract.hash[:12]}, with service {manifest.service}"


def _golden(package: Path, manifest: Manifest) -> tuple[Golden, str]:
    golden = read_golden(package, manifest)
    rows = require_fed(f"package {manifest.name}: {GOLDEN}", golden, manifest)
    made = f"{rows} rows make their tensors to the bit" if manifest.inputs else "of tensors"
    count = len(golden.cases)
    return golden, f"{count} case{'' if count == 1 else 's'}, {made}"


def _none(package: Path, manifest: Manifest, runtime: Runtime) -> tuple[None, str]:
    there = ", ".join(variant.file for variant in manifest.variants)
    raise PackageError(
        str(package), f"no model file for {runtime.name}: there is {there}", expected="at least one",
        remedy="ask the runtime that its files are for, or export it for this one, too",
    )  # fmt: skip


def _model(package: Path, manifest: Manifest, variant: Variant, golden: Golden, runtime: Runtime) -> tuple[float, str]:
    found = runtime.ask(package, manifest, variant, golden)
    apart = require_reproduced(golden, manifest, variant, found, runtime.tolerance)
    return apart, f"answers within {apart:.3g} of what is recorded" if apart else "answers as recorded"
