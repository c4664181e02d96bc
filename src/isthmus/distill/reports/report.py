"""`report.json`: what a distillation measured. docs/evaluation.md says what each part means."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from isthmus.features.errors import DataError

FORMAT = 1
Quality = Mapping[str, float | None]


class Model(msgspec.Struct, frozen=True):
    """A model of the comparison.

    Attributes:
        about: what it is, in words.
        quality: by metric, on the test part; the mean over the seeds of a model that was trained with several.
        intervals: low and high of such means.
        bytes: of its graph.
        p50_us: median time of one row, in microseconds.
        p99_us: 99th percentile of it.
        runtime: what computed, with its version and threads.
    """

    about: str = ""
    quality: Quality = {}
    intervals: dict[str, tuple[float, float] | None] = {}
    parameters: int | None = None
    bytes: int | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    runtime: str = ""


class TrainingRun(msgspec.Struct, frozen=True):
    """The training of a model with a seed; each entry of the history has its `step`."""

    model: str
    seed: int
    steps: int | None = None
    seconds: float | None = None
    quality: Quality = {}
    history: Sequence[Quality] = ()


class Estimate(msgspec.Struct, frozen=True):
    """A mean over the seeds and its interval."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class WorstSlice(msgspec.Struct, frozen=True):
    """The metric on the rows with the same value of a feature; the value None is a missing value."""

    column: str
    value: str | None
    rows: int
    teacher: float | None = None
    student: float | None = None
    control: float | None = None


class AtAge(msgspec.Struct, frozen=True):
    """The students' metric on the test part where all stored features are some seconds old."""

    seconds: float
    found: Estimate


class GateResult(msgspec.Struct, frozen=True):
    """A declared gate and the figure it was checked against."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    found: float | None = None
    holds: bool = False


class TrainingHalf(msgspec.Struct, frozen=True):
    """What the student costs once; any number may be unknown."""

    device: str | None = None
    host: str = ""
    precision: str | None = None
    threads: int | None = None
    rows: int | None = None
    steps: int | None = None
    seconds: float | None = None
    device_hours: float | None = None
    slowed_seconds: float = 0.0
    paused_seconds: float = 0.0
    flops: float | None = None
    peak_mb: float | None = None
    rows_per_second: float | None = None


class ServingHalf(msgspec.Struct, frozen=True):
    """What every answer costs; any number may be unknown."""

    runtime: str | None = None
    precision: str | None = None
    threads: int | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    requests_per_second: float | None = None
    memory_mb: float | None = None
    load_ms: float | None = None
    host: str | None = None
    device: str = "cpu"


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a distillation writes; most parts may be missing in the file."""

    format: int = FORMAT
    id: str
    contract: str = ""
    made_of: dict[str, Any] = {}
    name: str
    task: str
    pipeline: str | None = None
    metric: str
    more: bool = True
    seeds: list[int] = []
    shipped: int | None = None
    models: dict[str, Model]
    runs: list[TrainingRun] = []
    taught: Estimate | None = None
    gap_closed: Estimate | None = None
    measures: Quality = {}
    agreement: dict[str, Quality] = {}
    slices: list[WorstSlice] = []
    age: float | None = None
    ages: list[AtAge] = []
    rows: dict[str, int] = {}
    boundaries: list[str] | None = None
    seconds: dict[str, float | None] = {}
    paused: dict[str, float] = {}
    training: TrainingHalf | None = None

    def as_dict(self) -> dict[str, Any]:
        """The plain data of `report.json`: numbers that JSON lacks are None."""
        plain: dict[str, Any] = _finite(msgspec.to_builtins(self, enc_hook=float))  # of NumPy
        return plain


class Report(RunReport, frozen=True, kw_only=True):
    """What readers are shown: also the declaration's description and gates, and what the package costs."""

    description: str = ""
    gates: list[GateResult] = []
    serving: ServingHalf | None = None


def read_report(data: Mapping[str, Any]) -> Report:
    """A report from its plain data; a DataError if it is none of this format."""
    where = "report of a distillation"
    if data.get("format") != FORMAT:
        raise DataError(where, f"format {data.get('format')!r}", expected=f"format {FORMAT}")
    try:
        return msgspec.convert(data, Report)
    except msgspec.ValidationError as error:
        raise DataError(where, str(error), remedy="train again: `isthmus distill`") from error


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
