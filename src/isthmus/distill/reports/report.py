"""The measurements of a distillation, as `report.json`. docs/evaluation.md explains each part."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from isthmus.distill.gates import GateResult
from isthmus.features.errors import DataError

FORMAT = 1
UNLABELED = "unlabeled"
"""Entry of a report's `rows`: training rows without a label, which the student learned from the teacher alone."""
Quality = Mapping[str, float | None]


class ModelRecord(msgspec.Struct, frozen=True):
    """Quality on the test rows, size and latency of a model in a report.

    `p50_us` and `p99_us` are the times of one row. With several seeds, `quality` has the means, and `intervals` their
    95 % confidence intervals. `bytes` is the size of the ONNX graph; for a teacher, of its parameters.
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
    """The training of a model with one seed. `history` has an entry per evaluation, with its `step`.

    `steps` is less than `planned` if training stopped early. `processes` has the steps by number of processes.
    """

    model: str
    seed: int
    steps: int | None = None
    seconds: float | None = None
    quality: Quality = {}
    history: Sequence[Quality] = ()
    planned: int | None = None
    processes: dict[str, int] = {}


class SeedMean(msgspec.Struct, frozen=True):
    value: float | None = None
    low: float | None = None
    high: float | None = None


class WorstSlice(msgspec.Struct, frozen=True):
    """The metric of each model on the test rows in which the feature `column` has this `value`.

    `value` is None if the feature is missing; a metric is None if it is undefined.
    """

    column: str
    value: str | None
    rows: int
    teacher: float | None = None
    student: float | None = None
    control: float | None = None


class AtAge(msgspec.Struct, frozen=True):
    """The students' metric on the test part when all stored features are `seconds` old."""

    seconds: float
    found: SeedMean


class TrainingHalf(msgspec.Struct, frozen=True):
    """The cost of training all students and controls. `processes` has each number of processes that trained them."""

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
    processes: Sequence[int] = (1,)
    flops: float | None = None
    peak_mb: float | None = None
    rows_per_second: float | None = None


class ServingHalf(msgspec.Struct, frozen=True):
    """The cost of serving a student. `left_out` has the reason why each precision or file is not in the package."""

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
    left_out: dict[str, str] = {}


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
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
    models: dict[str, ModelRecord]
    runs: list[TrainingRun] = []
    taught: SeedMean | None = None
    gap_closed: SeedMean | None = None
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
        """Return the report as plain data for `report.json`. NaN and infinity become None."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self, enc_hook=float))  # NumPy numbers
        return plain


class Report(RunReport, frozen=True, kw_only=True):
    """A `RunReport` with the declaration's description, the results of its gates, and the cost of serving."""

    description: str = ""
    gates: list[GateResult] = []
    serving: ServingHalf | None = None


def read_report(data: Mapping[str, Any]) -> Report:
    where = "report of a distillation"
    if data.get("format") != FORMAT:
        raise DataError(where, f"format {data.get('format')!r}", expected=f"format {FORMAT}")
    try:
        return msgspec.convert(data, Report)
    except msgspec.ValidationError as error:
        raise DataError(where, str(error), remedy="run `isthmus distill` again") from error
