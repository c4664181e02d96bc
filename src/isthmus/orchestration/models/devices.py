"""`isthmus model benchmark-device`: measure the latest package on a device, and check the bounds on measurements."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from isthmus.distill.declaration import Distillation
from isthmus.distill.gates import DEVICE, GateResult, bounds_on, check_gate, require_passed
from isthmus.features import clock
from isthmus.orchestration.artifacts import Artifacts, devices_folder, serving_profile
from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.create import signer
from isthmus.package.device.measurement import DeviceMeasurement, measure, read_all, write
from isthmus.package.device.target import Target
from isthmus.package.manifest import open_package
from isthmus.package.signature import require_signature


@dataclass(frozen=True)
class BenchmarkReport:
    name: str
    measurement: DeviceMeasurement
    file: Path
    bounds: list[GateResult]

    def as_dict(self) -> dict[str, Any]:
        bounds = [{"metric": each.metric, "found": each.found, "holds": each.holds} for each in self.bounds]
        return {**msgspec.to_builtins(self.measurement), "path": str(self.file), "bounds": bounds}


def benchmark_device(project: Project, name: str | None, target: Target) -> BenchmarkReport:
    """Measure the latest package of a distillation on a device, sign the measurement, and keep it beside the package.

    Creates a signing key if there is none. Replaces an earlier measurement of the same package, target and
    processor. A broken bound raises no error here: `require_device_bounds` raises it. Raise PackageError if the
    project has a public key and did not sign the package, or if a model file does not run or does not reproduce its
    golden outputs on the device. Raise DependencyError if the device cannot be reached or lacks a library, and
    ConfigurationError if the signing key is unusable. If bounds are declared, raise DataError after the measurement is
    written if an earlier one is damaged or not signed with the key.
    """
    artifacts = Artifacts.of(project, name)
    package = open_package(artifacts.last_package())
    if project.public_key is not None:
        require_signature(package.files, project.public_key)
    signing = signer(project)  # first, to report an unusable key before the measurement
    measurement = measure(package, target, clock.now())
    file = write(measurement, devices_folder(package.files.folder), signing)
    return BenchmarkReport(artifacts.declared.name, measurement, file, device_bounds(project, artifacts.declared))


def device_bounds(project: Project, declared: Distillation) -> list[GateResult]:
    """Check the bounds on each device that measured the latest package. Without a measurement, no bound holds.

    Bounds apply to the ORT file in the served precision. Raise DataError if a measurement is damaged or not signed with
    the project's key.
    """
    bounds = bounds_on(declared.bounds, DEVICE)
    if not bounds:
        return []
    package = open_package(Artifacts(project, declared).last_package())
    folder = package.files.folder
    file = package.manifest.variant(serving_profile(project, folder).precision).file
    key = project.public_key or signer(project).public_key
    measured = [
        {f"{DEVICE}.{name}": value for name, value in msgspec.structs.asdict(each).items()}
        for measurement in read_all(devices_folder(folder), package.files.digest, key)
        for each in measurement.files
        if each.file == file
    ]
    return [check_gate(bound, figures.get(bound.metric)) for figures in measured or [{}] for bound in bounds]


def require_device_bounds(name: str, bounds: list[GateResult]) -> None:
    remedy = "run `isthmus model benchmark-device --on TARGET`; if the device is too slow, make the student smaller"
    require_passed(f"devices of {name}", bounds, remedy)
