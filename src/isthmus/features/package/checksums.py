"""The folder of a package: which files it may hold, how large, and whether they are as their sums say."""

import hashlib
import os
from pathlib import Path

from isthmus.features.errors import PackageError

SUMS = "SHA256SUMS"
MANIFEST, CONTRACT, GOLDEN, README = "manifest.json", "contract.json", "golden.json", "README.md"
SIGNATURE = "model.sig"
"""The one file without a sum: a signature differs each time, and the sums of a package must not."""

LARGEST = 2**31
"""Bytes of a file: what a model in ONNX format can have. Whoever sends more wants a reader to choke on it."""

_LARGEST_OF = {SUMS: 2**20, MANIFEST: 2**24, CONTRACT: 2**24, GOLDEN: 2**28}
"""Bytes of what is read as a whole, which takes several times as much memory."""

_SHOWN = 60
"""Characters of a line that a message shows."""

_LEADS_OUT, _UNFIT = frozenset("/\\:"), frozenset('*?"<>|')
"""What leads out of a folder, and what no name has, on one of the systems that packages are copied to."""

REMEDY = "export the model again, or copy the package folder again from where it was made"


def summed(path: Path) -> tuple[dict[str, str], dict[str, int]]:
    """The SHA-256 sums of a package's files, and their bytes, after every file was compared with its sum.

    No file is opened before it is certain that it is one of the folder: a link, a pipe or a file of any size may stand
    in its place.

    Raises:
        PackageError: the file that is missing, altered, not listed, too large or outside the folder.
    """
    sizes = _sizes(path)
    if SUMS not in sizes:
        raise PackageError(str(path / SUMS), "cannot be read", expected="a package folder", remedy=REMEDY)
    sums = _read_sums(path / SUMS)
    for name in sizes:
        if name not in sums and name not in (SUMS, SIGNATURE):
            where = str(path / name)
            raise PackageError(where, f"not listed in {SUMS}", expected="no file but those listed", remedy=REMEDY)
    for name, expected in sums.items():
        file = path / name
        if name not in sizes:
            raise PackageError(str(file), "missing", expected=f"a file with SHA-256 {expected}", remedy=REMEDY)
        found = _sum(file)
        if found != expected:
            raise PackageError(str(file), f"SHA-256 {found}", expected=expected, remedy=REMEDY)
    return sums, sizes


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of each file of a folder that holds nothing else."""
    try:
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
            for entry in found:
                if not entry.is_file(follow_symlinks=False):
                    raise PackageError(entry.path, "not a plain file", expected="files only", remedy=REMEDY)
            sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in found}
    except (OSError, ValueError) as error:  # a path with a NUL is no OSError
        raise PackageError(str(path / SUMS), "cannot be read", expected="a package folder", remedy=REMEDY) from error
    for name, size in sizes.items():
        if size > (most := _LARGEST_OF.get(name, LARGEST)):
            where, expected = str(path / name), f"at most {most:,}"
            raise PackageError(where, f"{size:,} bytes", expected=expected, remedy=REMEDY)
    return sizes


def _sum(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise PackageError(str(file), f"cannot be read ({error.strerror})", remedy=REMEDY) from error


def _read_sums(file: Path) -> dict[str, str]:
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(str(file), "cannot be read", expected="a package folder", remedy=REMEDY) from error
    if not text.endswith("\n"):
        raise PackageError(str(file), "ends within a line", expected="whole lines", remedy=REMEDY)
    sums: dict[str, str] = {}
    for number, line in enumerate(text[:-1].split("\n"), 1):
        digest, _, name = line.partition("  ")
        where, shown = f"{file} line {number}", repr(line if len(line) <= _SHOWN else line[:_SHOWN] + "…")
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef") or not name:
            raise PackageError(where, shown, expected="a SHA-256 sum and a file name", remedy=REMEDY)
        if unfit := _unfit(name):
            raise PackageError(where, f"{_quoted(name)} {unfit}", expected="a file name", remedy=REMEDY)
        if name in sums:
            raise PackageError(where, f"{name} is listed twice", expected="one sum per file", remedy=REMEDY)
        # On a phone, a Mac or Windows one of the two would take the place of the other.
        if same := [other for other in sums if other.casefold() == name.casefold()]:
            found = f"{name} differs from {same[0]} in the case of its letters alone"
            raise PackageError(where, found, expected="names that differ on every system", remedy=REMEDY)
        sums[name] = digest
    return sums


def _unfit(name: str) -> str:
    """Why nothing in a package can have a name; empty if it can."""
    if name in (SUMS, SIGNATURE):
        return "cannot have a sum"
    if name in (".", "..") or not _LEADS_OUT.isdisjoint(name):
        return "leaves the package folder"
    fits = name.isprintable() and _UNFIT.isdisjoint(name) and len(name.encode()) <= 255
    return "" if fits else "is no file name"


def _quoted(name: str) -> str:
    shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "…"
    return shown if shown.isprintable() else repr(shown)
