"""Speed of devices: a catalog of datasheet figures, which a project can extend, and measurements of this host."""

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

from isthmus.features.errors import ConfigurationError, Problem, one_of

FILE = "devices.toml"
KINDS = ("cpu", "cuda")
HOST = "this host"
Precision = Literal["fp32", "bf16", "int8"]
_NAME = f"lower-case letters, digits, _ and -, starting with a letter or digit, and not {' or '.join(KINDS)}"


def _check_name(name: str) -> str:
    if name in KINDS or not re.fullmatch("[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(_NAME)
    return name


_Name = Annotated[str, AfterValidator(_check_name)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]

_SIDE = 1024  # rows and columns of the matrices that are multiplied
_COPIED = 1 << 27  # bytes that are copied, more than fits in caches
_SECONDS = 0.4  # how long to repeat each measurement; the fastest counts, because other processes only add time


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Peak(_Figures):
    """Peak operations per second by precision; None if not supported or not published."""

    fp32: _Positive
    bf16: _Positive | None = None
    int8: _Positive | None = None


class Device(_Figures):
    """A CPU or GPU: bandwidth in bytes per second, memory in bytes, power in watts. A CPU's `cores` share the peak."""

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
        peak: float | None = getattr(self.peak, precision)
        return self.peak.fp32 if peak is None and precision == "int8" else peak

    def part(self, threads: int) -> "Device":
        if self.kind != "cpu" or threads >= self.cores:
            return self
        share = threads / self.cores
        rates = {name: rate * share for name, rate in self.peak.model_dump(exclude_none=True).items()}
        return self.model_copy(update={"peak": Peak(**rates), "bandwidth": self.bandwidth * share, "cores": threads})


_DEVICES = TypeAdapter(dict[_Name, Device])


def catalog(root: Path, priced: Iterable[str]) -> dict[str, Device]:
    """Load the devices to plan for, by name: built-in ones, and those in `devices.toml` in the project's folder `root`.

    A device in the file replaces a built-in one of the same name. `priced` has the names in the project's price list.
    Raise one ConfigurationError that lists all wrong figures in the file, and all priced names that are not devices.
    """
    known = _DEVICES.validate_python(tomllib.loads(files(__package__).joinpath(FILE).read_text("utf-8")))
    problems: list[Problem] = []
    own, names = root / FILE, {*known, *KINDS}
    if own.exists():
        try:
            tables = tomllib.loads(own.read_text("utf-8"))
            # Add the names before validation, so that a device with wrong figures is not also reported as unknown.
            names |= tables.keys()
            known |= _DEVICES.validate_python(tables)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigurationError(str(own), [Problem("TOML syntax", str(error))]) from error
        except ValidationError as error:
            problems += [_problem(dict(detail)) for detail in error.errors()]
    problems += [
        Problem(f"prices.hour.{name}", "is not a device", f"{one_of(names)}, or a table [{name}] in {FILE}")
        for name in priced
        if name not in names
    ]
    if problems:
        raise ConfigurationError(str(root), problems)
    return known


def _problem(detail: Mapping[str, Any]) -> Problem:
    place = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    where = f"{FILE}: {place}"
    if detail["type"] == "missing":
        return Problem(where, "is missing", "a value")
    if detail["type"] == "extra_forbidden":
        return Problem(where, "is not a setting of a device", one_of(Device.model_fields))
    if detail["loc"][-1] == "[key]":
        return Problem(where, "is not a valid name", _NAME)
    return Problem(where, repr(detail["input"]), str(detail["msg"]).removeprefix("Input should be "))


def measure_host(threads: int) -> Device:
    from threadpoolctl import threadpool_limits

    generator = np.random.default_rng(0)
    left, right = (generator.random((_SIDE, _SIDE), np.float32) for _ in range(2))
    source = np.ones(_COPIED // 4, np.float32)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    product = np.empty_like(left)
    with threadpool_limits(threads), ThreadPoolExecutor(threads) as pool:
        multiplied = _fastest(lambda: np.matmul(left, right, out=product))
        copied = _fastest(lambda: list(pool.map(lambda pair: np.copyto(*pair), parts)))
    return Device(
        kind="cpu",
        title=f"{HOST}: {platform.machine()}, {threads} of {os.cpu_count()} cores",
        peak=Peak(fp32=2 * _SIDE**3 / multiplied),
        bandwidth=2 * _COPIED / copied,  # each byte is read and written
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        cores=threads,
        source="measured just now",
        note="int8 is assumed to be as fast as fp32",
    )


def _fastest(call: Callable[[], object]) -> float:
    call()
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best
