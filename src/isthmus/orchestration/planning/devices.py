"""What devices can do: a catalogue of datasheet figures, which a project adds to, and this host, measured."""

import os
import platform
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from isthmus.features.contract.contract import one_of
from isthmus.features.errors import ConfigurationError, Problem

FILE = "devices.toml"
KINDS = ("cpu", "cuda")
HOST = "this host"
Precision = Literal["fp32", "bf16", "int8"]
_NAME = f"lower-case letters, digits, _ and -, a letter or digit first, and not {' or '.join(KINDS)}"


def _named(name: str) -> str:
    if name in KINDS or not re.fullmatch("[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(_NAME)
    return name


_Name = Annotated[str, AfterValidator(_named)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]

_SIDE = 1024
"""Rows and columns of the matrices that are multiplied."""
_COPIED = 1 << 27
"""Bytes that are copied: more than caches hold."""
_SECONDS = 0.4
"""For which each of both is repeated; the fastest counts, as everything else a machine does can only add."""


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Peak(_Figures):
    """Operations a second, by precision; None where the device has no such arithmetic, or nobody says how fast."""

    fp32: _Positive
    bf16: _Positive | None = None
    int8: _Positive | None = None


class Device(_Figures):
    """A device, or the part of one that does a piece of work.

    Attributes:
        kind: what a training profile calls it.
        title: what it is called.
        peak: operations a second.
        bandwidth: of its main memory, in bytes a second.
        memory: in bytes.
        cores: of a CPU: what its peak is divided among.
        watts: the most it takes.
        source: where the figures are from.
        note: which of them stand there otherwise.
    """

    kind: Literal["cpu", "cuda"]
    title: Annotated[str, Field(min_length=1)]
    peak: Peak
    bandwidth: _Positive
    memory: _Positive
    cores: Annotated[int, Field(ge=1, strict=True)] = 1
    watts: _Positive | None = None
    source: Annotated[str, Field(min_length=1)]
    note: str = ""

    def rate(self, precision: Precision) -> float | None:
        """Operations a second; None where it has no such arithmetic.

        INT8 is at least as fast as float32 everywhere, and is taken to be as fast where nobody says more.
        """
        found: float | None = getattr(self.peak, precision)
        return self.peak.fp32 if found is None and precision == "int8" else found

    def part(self, threads: int) -> "Device":
        """What so many threads have of a CPU while all its other cores are at work, too; a GPU is not divided."""
        if self.kind != "cpu" or threads >= self.cores:
            return self
        share = threads / self.cores
        rates = {name: rate * share for name, rate in self.peak.model_dump(exclude_none=True).items()}
        return self.model_copy(update={"peak": Peak(**rates), "bandwidth": self.bandwidth * share, "cores": threads})


def catalogue(root: Path, priced: Iterable[str]) -> dict[str, Device]:
    """The devices that are known in a project, by name: those that come with Isthmus, and those of its `devices.toml`.

    Args:
        root: the project's folder.
        priced: the devices that have a price.

    Raises:
        ConfigurationError: a figure is missing, or is no positive number, or what has a price is not known; every one
            of them is named.
    """
    known = _read(files("isthmus.orchestration.planning").joinpath(FILE).read_text("utf-8"))
    problems: list[Problem] = []
    own = root / FILE
    if own.exists():
        try:
            known |= _read(own.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigurationError(str(own), [Problem("TOML syntax", str(error))]) from error
        except ValidationError as error:
            problems += [_problem(dict(detail)) for detail in error.errors()]
    names = {*known, *_tables(own), *KINDS}
    problems += [
        Problem(f"prices.hour.{name}", "is no device", f"{one_of(names)}, or a table [{name}] in {FILE}")
        for name in priced
        if name not in names
    ]
    if problems:
        raise ConfigurationError(str(root), problems)
    return known


def _read(text: str) -> dict[str, Device]:
    return TypeAdapter(dict[_Name, Device]).validate_python(tomllib.loads(text))


def _tables(own: Path) -> set[str]:
    """Names of a file's own, whatever is wrong with their figures: each problem is told once."""
    return set(tomllib.loads(own.read_text("utf-8"))) if own.exists() else set()


def _problem(detail: Mapping[str, Any]) -> Problem:
    place = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    where = f"{FILE}: {place}"
    if detail["type"] == "missing":
        return Problem(where, "is missing", "a value")
    if detail["type"] == "extra_forbidden":
        return Problem(where, "is no figure of a device", one_of(Device.model_fields))
    if detail["loc"][-1] == "[key]":
        return Problem(
            where, "cannot be its name", f"lower-case letters, digits, _ and -, and not {' or '.join(KINDS)}"
        )
    return Problem(where, repr(detail["input"]), str(detail["msg"]).removeprefix("Input should be "))


def measured(threads: int) -> Device:
    """This host as so many threads find it: float32 products of matrices by NumPy's BLAS, and copies of 128 MiB.

    It takes a second. The bandwidth counts a byte that is copied twice, as it is read and written.
    """
    from threadpoolctl import threadpool_limits

    generator = np.random.default_rng(0)
    left, right = (generator.random((_SIDE, _SIDE), np.float32) for _ in range(2))
    source = np.ones(_COPIED // 4, np.float32)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    product = np.empty_like(left)
    with threadpool_limits(threads), ThreadPoolExecutor(threads) as pool:
        multiplied = _fastest(lambda: np.matmul(left, right, out=product))
        copied = _fastest(lambda: list(pool.map(lambda both: np.copyto(*both), parts)))
    return Device(
        kind="cpu",
        title=f"{HOST}: {platform.machine()}, {threads} of {os.cpu_count()} cores",
        peak=Peak(fp32=2 * _SIDE**3 / multiplied),
        bandwidth=2 * _COPIED / copied,
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        cores=threads,
        source="measured just now",
        note="int8 is taken to be as fast as fp32",
    )


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after one that does not count."""
    call()
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best
