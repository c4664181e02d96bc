"""The compilers of what an app is built from.

Kotlin's comes from the npm registry, once, into the user's cache. Swift's has to be there: `SWIFTC` says how it is
called, on Linux with where the module Crypto (swift-crypto) is.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

Command = Sequence[str]
PINNED = Path(__file__).parents[1] / "package" / "snapshot" / "kotlin"


QUICK = {"JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""Kotlin's compiler ends before optimized code would be worth its own compilation: this halves its time."""


def compiler() -> Path:
    """Kotlin's compiler, which is installed by the first call."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "isthmus" / "kotlin-compiler-2.4.20"
    if not cache.is_dir():
        fresh = Path(shutil.copytree(PINNED, cache.with_suffix(f".{os.getpid()}")))
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", fresh], check=True)
        fresh.rename(cache)
    return cache / "node_modules/kotlin-compiler/bin/kotlinc"


def kotlin(folder: Path, client: Path, cases: Path) -> Command:
    """The command of a client and its `Cases.kt`."""
    jar = str(folder / "cases.jar")
    options = ["-Werror", "-include-runtime", "-d", jar]
    command = ["bash", *map(str, (compiler(), *options, client.with_suffix(".kt"), cases / "Cases.kt"))]
    subprocess.run(command, env={**os.environ, **QUICK}, check=True)
    return ["java", "-cp", jar, "isthmus.CasesKt"]


def swift(folder: Path, client: Path, cases: Path) -> Command:
    """The command of a client and its `Cases.swift`."""
    compiler = shlex.split(os.environ.get("SWIFTC", "swiftc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is not there: no Swift is compiled; say in SWIFTC where the compiler is")
    options = ["-warnings-as-errors", "-parse-as-library", "-O", "-o", str(folder / "cases")]
    subprocess.run([*compiler, *options, client.with_suffix(".swift"), cases / "Cases.swift"], check=True)
    return [str(folder / "cases")]
