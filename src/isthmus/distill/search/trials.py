"""Students of a search: what was measured of each (`SearchTrial`), limits (`Budget`), and the file `search.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from isthmus.distill.types import Array
from isthmus.features.files import Journal

FORMAT = 1
"""Format version of `search.json`."""


class SearchTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The shape and the figures of one student in a search; None for a figure that was not measured.

    Attributes:
        status: "trained" and within the budget; "over budget", usually before training; or "failed" with an error.
        why: exceeded limits, or the error.
        over: relative excess of each exceeded limit, by the limit's name.
        bytes: size of the file in ORT format.
        difference: largest difference between the graph and the student in torch.
        score: the task's metric on the validation part, for the exported graph; `quality` has all metrics.
        seconds: time to measure and train the student.
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
    difference: float | None = msgspec.field(name="apart", default=None)
    score: float | None = None
    quality: dict[str, float | None] = {}
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return ", ".join([*(f"{name} {value}" for name, value in self.shape.items()), self.precision])


@dataclass(frozen=True)
class Budget:
    """The limits for a student in a search; None for no limit.

    `package_kb` limits ORT file and ONNX file together.
    """

    p99_ms: float
    memory_mb: float
    load_ms: float | None
    package_kb: float | None
    bytes: int | None

    def exceeded(
        self, *, p99_us: float, memory_mb: float, load_ms: float, files: tuple[int, int]
    ) -> dict[str, tuple[float, str]]:
        figures = {
            "p99": (p99_us / 1000, self.p99_ms, "ms"),
            "memory": (memory_mb, self.memory_mb, "MiB"),
            "load": (load_ms, self.load_ms, "ms"),
            "file": (files[0], self.bytes, "bytes"),
            "package": (sum(files) / 1000, self.package_kb, "kB"),
        }
        return {
            name: (value / most - 1, f"{name} {_shown(value)} {unit}, at most {_shown(most)}")
            for name, (value, most, unit) in figures.items()
            if most is not None and value > most
        }

    def __str__(self) -> str:
        optional = [(self.load_ms, "ms to load"), (self.package_kb, "kB of package"), (self.bytes, "bytes")]
        words = "".join(f", {most:,} {unit}" for most, unit in optional if most is not None)
        return f"a p99 of at most {self.p99_ms:g} ms, {self.memory_mb:g} MiB of memory{words}"


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


class Trials(Journal[SearchTrial]):
    def __init__(self, file: Path) -> None:
        super().__init__(
            file, SearchTrial,
            busy=("another process runs this search", "wait until it finishes, or stop it"),
            remedy="remove the file to search again; trained students stay cached",
        )  # fmt: skip

    def _records(self, lines: bytes) -> list[SearchTrial]:
        trials = super()._records(lines)
        for number, trial in enumerate(trials):
            if trial.number != number:
                raise self._broken(number, f"has student {trial.number}", f"student {number}")
        return trials


def recommended(trials: Sequence[SearchTrial], *, more: bool) -> SearchTrial | None:
    sign, fit = -1 if more else 1, [trial for trial in trials if trial.status == "trained"]
    return min(fit, key=lambda trial: (sign * (trial.score or 0.0), trial.p50_us or 0.0), default=None)


def nearest(trials: Sequence[SearchTrial]) -> SearchTrial | None:
    return min((trial for trial in trials if trial.over), key=lambda trial: max(trial.over.values()), default=None)


def values_at(places: Sequence[int], space: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {name: values[place] for place, (name, values) in zip(places, space.items(), strict=True)}


def front(points: Array) -> Array:
    """Return a mask, bool (n,), of the points on the Pareto front: the best trade-offs that a search has found.

    `points` is (n, k): a row per student and a column per measure, lower is better. A point is off the front if some
    other point is lower in at least one column and higher in none.
    """
    on = np.zeros(len(points), bool)
    # A better point has a smaller sum of ranks, so it comes first.
    ranks = sum(np.unique(column, return_inverse=True)[1] for column in points.T)
    for place in np.argsort(ranks, kind="stable"):
        rivals = points[on]
        on[place] = not ((rivals <= points[place]).all(1) & (rivals < points[place]).any(1)).any()
    return on
