"""Measurements of a package on a device: taken on a target, signed, and read back."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from isthmus.features.errors import DataError
from isthmus.features.files import write_atomically
from isthmus.package.device.target import DeviceRuntime, FileResult, Processor, Target, outputs_of
from isthmus.package.golden import read_golden
from isthmus.package.manifest import Package
from isthmus.package.replay import require_reproduced
from isthmus.package.snapshot.signature import SnapshotSigner, signature_checker

CALLS = 2000
"""Most timed predictions of a file."""

_KIND = b"isthmus device measurement 1\n"
"""Begins the signed bytes, so that no signature of a snapshot is one of a measurement."""


class DeviceMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of a package's ONNX Runtime files on a device, without the outputs.

    `package` is the digest of the package, and `at` the time in microseconds since 1970 UTC.
    """

    package: str
    target: str
    at: int
    processor: Processor
    files: tuple[FileResult, ...]


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    measurement: msgspec.Raw
    signature: bytes


def measure(package: Package, target: Target, at: int) -> DeviceMeasurement:
    """Run and time each ONNX Runtime file of a package on a target. `at` is the present.

    Raises a PackageError if a file does not reproduce its golden outputs there, or is rejected. Raises a
    DependencyError if the target cannot be reached or lacks a library.
    """
    golden, files = read_golden(package), []
    for variant in DeviceRuntime(target).files(package.manifest):
        processor, result = target.run(package, variant, golden.cases, CALLS)
        require_reproduced(golden, package.manifest, variant, outputs_of(result))
        cases = tuple(msgspec.structs.replace(case, outputs={}) for case in result.cases)
        files.append(msgspec.structs.replace(result, cases=cases))
    return DeviceMeasurement(package.files.digest, target.name, at, processor, tuple(files))


def write(measurement: DeviceMeasurement, folder: Path, signer: SnapshotSigner) -> Path:
    """Sign a measurement and write it to `folder`. It replaces an earlier one of the same target and processor."""
    body = msgspec.json.encode(measurement)
    signed = _Signed(msgspec.Raw(body), signer.sign(_KIND + body))
    place = hashlib.sha256(msgspec.json.encode([measurement.target, measurement.processor])).hexdigest()[:12]
    file = folder / f"{place}.json"
    write_atomically(file, msgspec.json.encode(signed))
    return file


def read_all(folder: Path, package: str, public_key: str) -> Iterator[DeviceMeasurement]:
    """Yield the measurements in a folder. `package` is the digest of the package that they must belong to.

    Raises a DataError if a file is damaged, is not signed by the key, or belongs to another package.
    """
    for file in sorted(folder.glob("*.json")):
        signed_by_key = signature_checker(public_key, str(file))
        try:
            signed = msgspec.json.decode(file.read_bytes(), type=_Signed)
            measurement = msgspec.json.decode(signed.measurement, type=DeviceMeasurement)
        except (OSError, ValueError) as error:
            raise _unusable(file, f"cannot be read ({error})") from error
        if not signed_by_key(_KIND + bytes(signed.measurement) + signed.signature):
            raise _unusable(file, "is not signed by the key of the project, or was changed after it was signed")
        if measurement.package != package:
            raise _unusable(file, f"belongs to package {measurement.package[:12]}")
        yield measurement


def _unusable(file: Path, problem: str) -> DataError:
    return DataError(str(file), problem, remedy="remove it and run `isthmus model benchmark-device --on TARGET`")
