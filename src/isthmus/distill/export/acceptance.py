"""Whether model files answer as the student does, are good enough, fast enough and small enough."""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from isthmus.distill.evaluation.metrics import interleaved, throughput
from isthmus.distill.gates import check_figures
from isthmus.distill.onnx.footprint import footprint
from isthmus.distill.onnx.runtime import Run, ask, predict, session
from isthmus.distill.restore import Restored
from isthmus.distill.tasks.task import Case, Task, graph_answers
from isthmus.distill.training.teacheroutputs import complete_outputs
from isthmus.distill.types import Answers, Array, spread
from isthmus.features.errors import ConfigurationError, GateFailed, Problem
from isthmus.features.package.manifest import Feeds, Variant
from isthmus.features.profiles import FASTEST, ServingProfile


class Trial:
    """Compares model files with a student, and says how good they are.

    Args:
        found: the student.
        golden: cases of the package.
        cache: of the teacher's outputs.
        profile: how the package is served.

    Attributes:
        taught: what the teacher says of all rows of the training set.
    """

    def __init__(self, found: Restored, golden: Sequence[Case], cache: Path, profile: ServingProfile) -> None:
        task = found.task
        self._task, self._golden, self._profile = task, golden, profile
        test = task.material.parts.test
        some = test[spread(len(test), task.compared)]
        self._cases = [
            task.case(found.student, some[begin : begin + task.at_once]) for begin in range(0, len(some), task.at_once)
        ]
        whole = np.arange(task.material.table.num_rows)
        self.taught, _ = complete_outputs(task, task.teacher(), whole, cache, lambda _text, _done: None)
        self._said = {key: tensor.float().numpy() for key, tensor in self.taught[test].items()}

    def of(
        self, file: str, model: bytes, run: Run | None = None, most: Mapping[str, int] | None = None
    ) -> tuple[Variant, list[dict[str, Array]]]:
        """A file, and its answers in the golden cases.

        Args:
            file: its name.
            model: what it holds.
            run: what runs it; by default ONNX Runtime.
            most: the largest sizes that it takes, by their name.

        Raises:
            ConfigurationError: the student does not say all that its graph gives.
            GateFailed: it differs too much from the student, or is not good enough.
        """
        task, (_, precision, form) = self._task, file.split(".")
        run = run or partial(ask, session(model, self._profile.threads))
        answers = [run(case.feeds) for case in self._golden]
        require_said(task, self._golden[0].expected, answers[0])
        pairs = [*zip(self._golden, answers, strict=True), *((case, run(case.feeds)) for case in self._cases)]
        # NumPy's: Python's loses a NaN.
        worst = float(np.max([difference(case.expected, found) for case, found in pairs]))
        # `not <=` and not `>`: a NaN must not pass.
        if not worst <= task.tolerance[precision]:
            raise GateFailed(
                f"{file}: golden cases and test part",
                f"answers differ from the student's by up to {worst:.2g}"
                if math.isfinite(worst)
                else "answers have other sizes than the student's, or are no numbers",
                expected=f"at most {task.tolerance[precision]}",
                remedy="serve fp32, or train again" if precision == "int8" else "report this: the graph is wrong",
            )
        quality = self._quality(run)
        self._require(file, quality)
        return Variant(
            file=file,
            precision="int8" if precision == "int8" else "fp32",
            format="ort" if form == "ort" else "pte" if form == "pte" else "onnx",
            bytes=len(model),
            sha256=hashlib.sha256(model).hexdigest(),
            tolerance=task.tolerance[precision],
            worst=worst,
            quality={name: value if math.isfinite(value) else None for name, value in quality.items()},
            most=dict(most or {}),
        ), answers

    def _quality(self, run: Any) -> dict[str, float]:
        task, test = self._task, self._task.material.parts.test
        return task.quality(graph_answers(task, run, test), test, self._said)

    def _require(self, file: str, quality: Mapping[str, float]) -> None:
        """The gates about the student hold for its file, too."""
        declared = self._task.material.declaration
        found = check_figures({f"student.{name}": value for name, value in quality.items()}, declared.required)
        if failed := [one for one in found if not one.holds]:
            raise GateFailed(
                file,
                "; ".join(map(str, failed)),
                expected="; ".join(one.expected for one in failed),
                remedy="serve another precision, train longer, or change the gates in the definitions",
            )


def require_said(task: Task, expected: Answers, found: Answers) -> None:
    """Refuses a graph that gives what its student does not say.

    Raises:
        ConfigurationError: with the output.
    """
    if lacking := found.keys() - expected.keys():
        said = ", ".join(expected)
        problem = Problem(f"output {min(lacking)} of its graph", f"the student says {said}", "what `expected` says")
        raise ConfigurationError(task.material.declaration.where, [problem])


def difference(expected: Answers, found: Answers) -> float:
    """The largest absolute difference of outputs from what is expected of them; NaN if a number is missing."""
    if any(values.shape != expected[name].shape for name, values in found.items()):
        return math.nan
    apart = [np.abs(values.astype(np.float64) - expected[name]).max(initial=0.0) for name, values in found.items()]
    return float(np.max(apart))


class Measured(msgspec.Struct, frozen=True):
    """What one answer takes on this host.

    Attributes:
        precision: of the model.
        threads: that compute.
        p50_us: the median, in microseconds.
        p99_us: of a hundred the slowest.
        requests_per_second: one after the other.
        memory_mb: MiB by which a process grows when it opens the model and answers once.
        load_ms: milliseconds from its file to that answer.
    """

    precision: str
    threads: int
    p50_us: float
    p99_us: float
    requests_per_second: float
    memory_mb: float
    load_ms: float


def precisions(files: Collection[str], profile: ServingProfile) -> list[str]:
    """Which precisions may be served, by the files in ORT format."""
    there = dict.fromkeys(file.split(".")[1] for file in files if file.endswith(".ort"))
    return [one for one in there if profile.precision in (one, FASTEST)]


def allowed(task: Task, profile: ServingProfile) -> list[str]:
    """Which precisions of a task may be served.

    Raises:
        ConfigurationError: none.
    """
    if found := precisions([f"model.{one}.ort" for one in task.tolerance], profile):
        return found
    problem = Problem("precision", profile.precision, f"a precision that the task has: {', '.join(task.tolerance)}")
    raise ConfigurationError("profiles.serving", [problem])


def fit(models: Mapping[str, bytes], row: Feeds, sizes: Mapping[str, int], profile: ServingProfile) -> Measured:
    """What one row takes: of several precisions, in the one with the smaller median, all measured in turn.

    Args:
        models: in ORT format, by precision.
        row: what one is fed.
        sizes: bytes of a package that has one precision, by that.
        profile: how it is served, and what it may take.

    Raises:
        GateFailed: it is slower or larger than the profile allows, with all that it exceeds.
    """
    opened = {precision: session(model, profile.threads) for precision, model in models.items()}
    times = interleaved({name: partial(predict, one, row) for name, one in opened.items()}, calls=2000)
    chosen = min(times, key=lambda precision: times[precision]["p50_us"])
    rate = throughput(partial(predict, opened[chosen], row))
    first = footprint(models[chosen], row, profile.threads, profile.load_ms)
    measured = Measured(
        chosen, profile.threads, **times[chosen], requests_per_second=rate, memory_mb=first.memory_mb,
        load_ms=first.load_ms,
    )  # fmt: skip
    if missed := _missed(measured, sizes[chosen], profile):
        keys = [one.key for one in missed]
        raise GateFailed(
            ", ".join(f"profiles.serving.{key}" for key in keys),
            "; ".join(one.found for one in missed),
            expected="; ".join(one.expected for one in missed),
            remedy="make the student smaller, keep fewer golden rows, serve int8, or allow more"
            if keys == ["package_kb"]
            else "make the student smaller, allow more"
            + ("" if keys == ["memory_mb"] else ", or measure on a machine that does nothing else"),
        )
    return measured


class _Missed(NamedTuple):
    """A budget that is exceeded."""

    key: str
    found: str
    expected: str


def _missed(measured: Measured, size: int, profile: ServingProfile) -> list[_Missed]:
    slowest, kilobytes = measured.p99_us / 1000, size / 1000
    budgets = [
        ("latency_objective_ms", slowest, f"p99 of one row is {slowest:.3f}", "ms"),
        ("memory_mb", measured.memory_mb, f"a session of the model takes {measured.memory_mb}", "MiB"),
        ("load_ms", measured.load_ms, f"the first answer of a fresh process comes after {measured.load_ms}", "ms"),
        ("package_kb", kilobytes, f"a package of {measured.precision} alone has {kilobytes:.1f}", "kB"),
    ]
    return [
        _Missed(key, f"{found} {unit}", f"at most {most:g} {unit}")
        for key, value, found, unit in budgets
        if (most := getattr(profile, key)) is not None and value > most
    ]
