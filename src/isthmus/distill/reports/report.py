"""`report.json` of a run, as its papers read it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from isthmus.features.errors import DataError

FORMAT = 1
Quality = dict[str, float | None]
Bounds = tuple[float, float]


class Model(msgspec.Struct, frozen=True):
    """One of the models that are compared.

    Attributes:
        about: what it is, in words.
        quality: by metric, on the test part; of a model that was trained with several seeds the mean over them.
        intervals: of such means: low and high.
        parameters: how many.
        bytes: of its graph.
        p50_us: of one answer, in microseconds.
        p99_us: as p50_us.
        runtime: what answered, with its version and threads.
    """

    about: str = ""
    quality: Quality = {}
    intervals: dict[str, Bounds | None] = {}
    parameters: int | None = None
    bytes: int | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    runtime: str = ""


class Run(msgspec.Struct, frozen=True):
    """One training: of a model with a seed; each entry of the history has its `step`."""

    model: str
    seed: int
    steps: int | None = None
    seconds: float | None = None
    quality: Quality = {}
    history: list[Quality] = []


class Estimate(msgspec.Struct, frozen=True):
    """A number and its interval."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class WorstSlice(msgspec.Struct, frozen=True):
    """The metric on the rows with one value of a feature; the value None is the missing one."""

    column: str
    value: str | None
    rows: int
    teacher: float | None = None
    student: float | None = None
    control: float | None = None


class Gate(msgspec.Struct, frozen=True):
    """What was declared of a metric, and what was found."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    found: float | None = None
    holds: bool = False


class TrainingHalf(msgspec.Struct, frozen=True):
    """What the student costs once; every number may be unknown."""

    device: str | None = None
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
    """What every answer costs; every number may be unknown."""

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


class Report(msgspec.Struct, frozen=True):
    """The whole of it; `docs/evaluation.md` says what each part means."""

    format: int
    id: str
    name: str
    task: str
    metric: str
    models: dict[str, Model]
    pipeline: str | None = None
    description: str = ""
    seeds: list[int] = []
    shipped: int | None = None
    runs: list[Run] = []
    gap_closed: Estimate | None = None
    taught: Estimate | None = None
    agreement: dict[str, Quality] = {}
    slices: list[WorstSlice] = []
    rows: dict[str, int] = {}
    boundaries: list[str] | None = None
    seconds: dict[str, float | None] = {}
    paused: dict[str, float] = {}
    gates: list[Gate] = []
    training: TrainingHalf | None = None
    serving: ServingHalf | None = None


def read_report(data: Mapping[str, Any]) -> Report:
    """A report from its plain data.

    Raises:
        DataError: it is no report of this format.
    """
    where = "report of a distillation"
    if data.get("format") != FORMAT:
        raise DataError(where, f"format {data.get('format')!r}", expected=f"format {FORMAT}")
    try:
        return msgspec.convert(data, Report)
    except msgspec.ValidationError as error:
        raise DataError(where, str(error), remedy="train again: `isthmus distill`") from error
