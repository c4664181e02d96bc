"""Students that a search has tried: what is known of each, what all must keep to, and the file that keeps them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from isthmus.features.files import Journal


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a student.

    Attributes:
        number: from 0 on.
        shape: what it was made with.
        precision: of its graph.
        status: "trained"; "over budget", found before it was trained, unless it has a score; or "failed".
        why: what it is over, or how it failed.
        over: by which share it is over each part of the budget that it does not keep to.
        parameters: how many.
        bytes: of its file in ORT format.
        p50_us: median time of one row in ONNX Runtime, with the threads of the serving profile, in microseconds.
        p99_us: 99th percentile of it.
        memory_mb: MiB by which a fresh process grows until its first answer.
        load_ms: milliseconds from the file to that answer.
        apart: the largest difference of its answers from the student's in torch.
        score: the task's metric on the validation part, of the exported graph in its runtime.
        quality: all measures there.
        seconds: of the whole trial.
    """

    number: int
    shape: dict[str, Any]
    precision: str
    status: Literal["trained", "over budget", "failed"]
    why: str = ""
    over: dict[str, float] = {}
    parameters: int | None = None
    bytes: int | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    memory_mb: float | None = None
    load_ms: float | None = None
    apart: float | None = None
    score: float | None = None
    quality: dict[str, float | None] = {}
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """It, in words."""
        return ", ".join([*(f"{name} {value}" for name, value in self.shape.items()), self.precision])


@dataclass(frozen=True)
class Budget:
    """What a student may take.

    Attributes:
        p99_ms: the largest p99 of one row, in milliseconds.
        memory_mb: the most by which a process grows until its first answer, in MiB.
        load_ms: the longest time to that, in milliseconds; None for any.
        package_kb: the largest package, in kB, of which both model files are a part; None for any.
        bytes: the largest file in ORT format; None for any.
        weights: bytes of the teacher's weights, which those of the student must be less than; None if not known.
    """

    p99_ms: float
    memory_mb: float
    load_ms: float | None
    package_kb: float | None
    bytes: int | None
    weights: int | None

    def over(
        self, *, p99_us: float, memory_mb: float, load_ms: float, files: tuple[int, int], weights: int
    ) -> dict[str, tuple[float, str]]:
        """What is over it: the share by which it is, and that in words. Of files, that in ORT format is first."""
        found = {
            "p99": (p99_us / 1000, self.p99_ms, "ms"),
            "memory": (memory_mb, self.memory_mb, "MiB"),
            "load": (load_ms, self.load_ms, "ms"),
            "file": (files[0], self.bytes, "bytes"),
            "package": (sum(files) / 1000, self.package_kb, "kB"),
            "weights": (weights, None if self.weights is None else self.weights - 1, "bytes"),
        }
        return {
            name: (value / most - 1, f"{name} {_shown(value)} {unit}, at most {_shown(most)}")
            for name, (value, most, unit) in found.items()
            if most is not None and value > most
        }

    def __str__(self) -> str:
        further = [(self.load_ms, "ms to load"), (self.package_kb, "kB of package"), (self.bytes, "bytes")]
        words = "".join(f", {most:,} {unit}" for most, unit in further if most is not None)
        return f"a p99 of at most {self.p99_ms:g} ms, {self.memory_mb:g} MiB of memory{words}"


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


class Trials(Journal[Tried]):
    """The file of a search: a line for each student that was tried."""

    def __init__(self, file: Path) -> None:
        super().__init__(
            file, Tried,
            busy=("another process is searching here", "wait until it is done, or stop it"),
            remedy="remove the file to search anew; trained students are kept",
        )  # fmt: skip

    def _records(self, whole: bytes) -> list[Tried]:
        found = super()._records(whole)
        for number, one in enumerate(found):
            if one.number != number:
                raise self._broken(number, f"is student {one.number}", f"student {number}")
        return found


def recommended(tried: Sequence[Tried], *, more: bool) -> Tried | None:
    """Of those that were trained and keep to the budget the best, of equal ones the fastest; None of none."""
    fit = [one for one in tried if one.status == "trained" and one.score is not None and one.p50_us is not None]
    return min(fit, key=lambda one: ((-1 if more else 1) * (one.score or 0.0), one.p50_us), default=None)


def nearest(tried: Sequence[Tried]) -> Tried | None:
    """Of those over the budget the one that is least over it, by the part of which it is most over."""
    over = [one for one in tried if one.over]
    return min(over, key=lambda one: max(one.over.values()), default=None)


def shaped(places: Sequence[int], space: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The values at some places."""
    return {name: values[place] for place, (name, values) in zip(places, space.items(), strict=True)}
