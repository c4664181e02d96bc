"""Check a package by itself. Only a signature reveals golden cases that were changed together with the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import PackageError
from isthmus.features.profiles import ServingDevice, ServingProfile
from isthmus.package import replay
from isthmus.package.checksums import CONTRACT, GOLDEN, SIGNATURE, damage_error
from isthmus.package.featurizer.form import HEAD
from isthmus.package.golden import Golden, Inputs, read_golden
from isthmus.package.manifest import WHOLE, Manifest, Package, Variant, open_package, read_contract
from isthmus.package.prompts import open_tokenizer, read_prompts, require_generated
from isthmus.package.signature import key_name, require_signature
from isthmus.package.verdict import ONNX_RUNTIME

T = TypeVar("T")


class Runtime(Protocol):
    """A runtime for model files. `tolerance` is the largest accepted difference from the recorded outputs."""

    name: str
    tolerance: float

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        """Return the model files of a package that this runtime can run."""

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[replay.Answers]:
        """Run the model file `variant` on each batch of inputs in `cases`; return the outputs of each batch in order.

        Raises PackageError if the file fails, and DependencyError if the runtime is not installed.
        """


class OnnxRuntime:
    name = ONNX_RUNTIME
    tolerance = replay.GOLDEN_TOLERANCE
    device: ServingDevice = "cpu"

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        return [variant for variant in manifest.variants if variant.format in WHOLE]

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[replay.Answers]:
        session = replay.open_session(package, variant, 1, self.device)
        return replay.answers(session, package.manifest, variant, [case.fed(variant) for case in cases])


class ServedRuntime(OnnxRuntime):
    """ONNX Runtime on the device of a server, for the file that the server opens."""

    def __init__(self, profile: ServingProfile) -> None:
        self.name = f"{ONNX_RUNTIME} on {profile.device}"
        self.device, self._precision = profile.device, profile.precision

    def files(self, manifest: Manifest) -> Sequence[Variant]:
        return [manifest.served(self._precision, self.device)]

    def label(self, file: str) -> str:
        return f"{file} in {self.name}"


@dataclass(frozen=True)
class Check:
    """The result of a check; `error` is None if it passed."""

    subject: str
    finding: str
    error: PackageError | None = None


@dataclass(frozen=True)
class Inspection:
    """The results of all checks of a package, in order. Checks that depend on a failed one did not run.

    `digest` is empty if the files do not match their checksums. `worst` has the largest difference from the recorded
    outputs for each model file that passed.
    """

    package: Path
    digest: str
    checks: Sequence[Check]
    worst: Mapping[str, float]

    def require(self) -> None:
        for check in self.checks:
            if check.error is not None:
                raise check.error

    def as_dict(self) -> dict[str, Any]:
        return {
            "package": str(self.package),
            "digest": self.digest,
            "passed": all(check.error is None for check in self.checks),
            "checks": [
                {"check": check.subject, "passed": check.error is None, "found": check.finding} for check in self.checks
            ],
            "worst": dict(self.worst),
        }


def inspect(path: Path, *, key: str | None = None, runtime: Runtime | None = None) -> Inspection:
    """Check a package folder before its use: checksums, signature, recorded inputs, and outputs of its model files.

    `key` is the public key (PEM) to check the signature with. Without it, the signature is not checked. `runtime` runs
    the model files, by default ONNX Runtime in this process. The model files do not run if an earlier check fails: a
    checksum, the signature, or the golden cases (the recorded inputs and outputs). A failed check is part of the result
    and raises no error. May take minutes. Raises DependencyError if a check needs a library that is not installed.
    """
    runner = runtime or OnnxRuntime()
    checks: list[Check] = []
    worst: dict[str, float] = {}

    def check(subject: str, question: Callable[[], tuple[T, str]]) -> T | None:
        try:
            answer, finding = question()
        except PackageError as error:
            checks.append(Check(subject, error.found, error))
            return None
        checks.append(Check(subject, finding))
        return answer

    package = check("files and manifest", lambda: _opened(path))
    if package is None:
        return Inspection(path, "", checks, worst)
    inspection = Inspection(path, package.files.digest, checks, worst)
    check(SIGNATURE, lambda: _signature(package, key))
    if checks[-1].error is not None:
        # Do not open files of an untrusted package in a runtime.
        return inspection
    check(CONTRACT, lambda: _contract(package))
    golden = check(GOLDEN, lambda: _golden(package))
    if golden is not None:
        if HEAD in package.manifest.files:
            check(HEAD, lambda: _head(package, golden))
        files = runner.files(package.manifest)
        if not files:
            check("model files", lambda: _no_files(package, runner))
        for variant in package.manifest.variants:
            if variant not in files:
                checks.append(Check(variant.file, f"not run: {variant.format} format does not run in {runner.name}"))
                continue
            difference = check(variant.file, partial(_model, package, variant, golden, runner))
            if difference is not None:
                worst[variant.file] = difference
        if package.manifest.generation is not None:
            check(package.manifest.generation.prompts, lambda: _prompts(package))
            if checks[-1].error is None and isinstance(runner, OnnxRuntime):
                for variant in (each for each in files if each.file in worst):
                    check(f"{variant.file}: prompts", partial(_generated, package, variant))
    return inspection


def _opened(path: Path) -> tuple[Package, str]:
    package = open_package(path)
    return package, f"match their checksums: {package.manifest.name}, student {package.manifest.model}"


def _signature(package: Package, key: str | None) -> tuple[None, str]:
    if key is None:
        return None, "signed; no key to check it with" if SIGNATURE in package.files.sizes else "not required"
    require_signature(package.files, key)
    return None, f"by key {key_name(key)}"


def _contract(package: Package) -> tuple[Contract, str]:
    contract, manifest = read_contract(package), package.manifest
    columns = (*contract.inputs(manifest.service), *contract.raw_inputs(manifest.service))
    known = {column.name: column.dtype for column in columns}
    for item in manifest.model_inputs:
        if (declared := known.get(item.name)) != item.dtype:
            problem = f"{item.name} is {declared}" if declared else f"has no {item.name}"
            expected = f"{item.name} of type {item.dtype}, as in the manifest"
            raise damage_error(package.files.folder / CONTRACT, problem, expected)
    return contract, f"{contract.hash[:12]}, with service {manifest.service}"


def _golden(package: Package) -> tuple[Golden, str]:
    golden, manifest = read_golden(package), package.manifest
    rows = replay.check_input_tensors(f"package {manifest.name}: {GOLDEN}", golden, package.model_inputs)
    source = f"{rows} rows reproduce their tensors bit for bit" if manifest.inputs else "of tensors"
    count = len(golden.cases)
    return golden, f"{count} case{'' if count == 1 else 's'}, {source}"


def _head(package: Package, golden: Golden) -> tuple[None, str]:
    return None, f"{replay.check_featurizer(package, golden)} rows reproduce the tensors of the core bit for bit"


def _prompts(package: Package) -> tuple[None, str]:
    open_tokenizer(package)
    count = len(read_prompts(package))
    return None, f"the tokens of {count} prompt{'' if count == 1 else 's'} match the recorded ones"


def _generated(package: Package, variant: Variant) -> tuple[None, str]:
    count = require_generated(package, variant, replay.open_session(package, variant, 1), read_prompts(package))
    return None, f"repeats {count:,} greedy tokens"


def _no_files(package: Package, runtime: Runtime) -> tuple[None, str]:
    files = ", ".join(variant.file for variant in package.manifest.variants)
    raise PackageError(
        str(package.files.folder), f"has no model file for {runtime.name}, only {files}", expected="at least one",
        remedy="use the runtime that its files are for, or export it for this one too",
    )  # fmt: skip


def _model(package: Package, variant: Variant, golden: Golden, runtime: Runtime) -> tuple[float, str]:
    outputs = runtime.ask(package, variant, golden.cases)
    worst = replay.require_reproduced(golden, package.manifest, variant, outputs, runtime.tolerance)
    return worst, f"within {worst:.3g} of the recorded outputs" if worst else "matches the recorded outputs exactly"
