"""The files of a package folder: checksums, size limits, and the error for a damaged package."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from isthmus.features.errors import PackageError

SUMS = "SHA256SUMS"
MANIFEST, CONTRACT, GOLDEN, README = "manifest.json", "contract.json", "golden.json", "README.md"
SIGNATURE = "model.sig"
"""The only file without a checksum: a signature differs each time, and the digest of a package must not."""

LARGEST = 2**31
"""Bytes of a file: the limit of the ONNX format. A larger file may be an attack on the reader."""

_LARGEST_OF = {SUMS: 2**20, MANIFEST: 2**24, CONTRACT: 2**24, SIGNATURE: 2**24, GOLDEN: 2**28}
"""Bytes of files that are parsed whole, which takes several times as much memory."""

_SHOWN = 60
"""Characters of a line in a message."""

_LEADS_OUT, _UNFIT = frozenset("/\\:"), frozenset('*?"<>|')
"""Characters that lead out of a folder, or that some system does not allow in names."""

REMEDY = "export the model again, or copy the package folder again from where it was made"


def damage_error(where: Path | str, problem: str, expected: str = "") -> PackageError:
    return PackageError(str(where), problem, expected=expected, remedy=REMEDY)


@dataclass(frozen=True)
class PackageFiles:
    """Files of a package folder with their checksums. `digest` identifies the package.

    `digest` is the SHA-256 of the checksum file. `sums` has the SHA-256 of every file except the checksum file and the
    signature. `sizes` has the bytes of every file.
    """

    folder: Path
    digest: str
    sums: Mapping[str, str]
    sizes: Mapping[str, int]

    def read(self, name: str) -> bytes:
        """Read a file of the package; raise PackageError if it is unreadable or was changed, KeyError if not listed."""
        data = read_file(self.folder / name)
        _require_sum(self.folder / name, hashlib.sha256(data).hexdigest(), self.sums[name])
        return data


def verify_checksums(path: Path) -> PackageFiles:
    """Check every file of a package folder against its checksum. Return all checksums and file sizes.

    Call it before you read a package. Raises a PackageError if a file is missing, changed, not listed, too
    large or a hard link; if the folder has a symbolic link, a pipe or a subfolder; or if a name is invalid on some
    system. Does not check the
    signature: `signature.require_signature` does that.
    """
    sizes = _sizes(path)
    if SUMS not in sizes:
        raise _unreadable(path)
    text = read_file(path / SUMS)
    sums = _read_sums(path / SUMS, text)
    for name in sizes:
        if name not in sums and name not in (SUMS, SIGNATURE):
            raise damage_error(path / name, f"not listed in {SUMS}", "no file but those listed")
    for name, expected in sums.items():
        if name not in sizes:
            raise damage_error(path / name, "missing", f"a file with SHA-256 {expected}")
        with _opened(path / name) as opened:
            _require_sum(path / name, hashlib.file_digest(opened, "sha256").hexdigest(), expected)
    return PackageFiles(path, hashlib.sha256(text).hexdigest(), sums, sizes)


def read_file(file: Path) -> bytes:
    with _opened(file) as opened:
        return opened.read()


def _opened(file: Path) -> BufferedReader:
    # The file may have been replaced since the folder was listed, so check it again.
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise damage_error(file, f"cannot be read ({error.strerror})") from error
    opened = os.fdopen(handle, "rb")
    try:
        _require_plain(file, os.fstat(handle))
    except BaseException:
        opened.close()
        raise
    return opened


def _require_plain(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise damage_error(file, "not a plain file", "files only")
    if status.st_nlink > 1:
        problem = f"has {status.st_nlink} names (hard links): a write to another name would change it"
        remedy = "copy the folder with `cp -r` and use the copy, whose files have one name each"
        raise PackageError(str(file), problem, expected="a file with one name", remedy=remedy)
    if status.st_size > (most := _LARGEST_OF.get(file.name, LARGEST)):
        raise damage_error(file, f"{status.st_size:,} bytes", f"at most {most:,}")


def require_unique_keys(file: Path, data: bytes) -> None:
    """Raise PackageError if an object in the JSON text `data` has a key twice.

    Programs differ in which of the two values they use. The error names `file`. Raises ValueError for invalid JSON, and
    RecursionError for JSON that is nested too deeply.
    """

    def check(pairs: list[tuple[str, object]]) -> None:
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise damage_error(file, f"has the key {_short(key)!r} twice", "each key once")
            seen.add(key)

    json.loads(data, object_pairs_hook=check)


def _require_sum(file: Path, actual: str, expected: str) -> None:
    if actual != expected:
        raise damage_error(file, f"SHA-256 {actual}", expected)


def _unreadable(path: Path) -> PackageError:
    return damage_error(path / SUMS, "cannot be read", "a package folder")


def _sizes(path: Path) -> dict[str, int]:
    try:
        with os.scandir(path) as entries:
            statuses = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
        raise _unreadable(path) from error
    for name, status in sorted(statuses.items()):
        _require_plain(path / name, status)
    return {name: status.st_size for name, status in statuses.items()}


def _read_sums(file: Path, data: bytes) -> dict[str, str]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(file.parent) from error
    if not text.endswith("\n"):
        raise damage_error(file, "ends within a line", "whole lines")
    sums: dict[str, str] = {}
    for number, line in enumerate(text[:-1].split("\n"), 1):
        sha256, _, name = line.partition("  ")
        where = f"{file} line {number}"
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef") or not name:
            raise damage_error(where, repr(_short(line)), "a SHA-256 sum and a file name")
        if unfit := _name_problem(name):
            shown = _short(name)
            raise damage_error(where, f"{shown if shown.isprintable() else repr(shown)} {unfit}", "a file name")
        if name in sums:
            raise damage_error(where, f"{name} is listed twice", "one sum per file")
        # On a phone, a Mac or Windows these files would replace each other.
        if same := [listed for listed in sums if listed.casefold() == name.casefold()]:
            problem = f"{name} differs from {same[0]} only in upper and lower case"
            raise damage_error(where, problem, "names that differ on every system")
        sums[name] = sha256
    return sums


def _name_problem(name: str) -> str:
    if name in (SUMS, SIGNATURE):
        return "cannot have a sum"
    if name in (".", "..") or not _LEADS_OUT.isdisjoint(name):
        return "leaves the package folder"
    fits = name.isprintable() and _UNFIT.isdisjoint(name) and len(name.encode()) <= 255
    return "" if fits else "is not a file name"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
