"""Builds students, measures them as they would be served, and trains them."""

import errno
import fcntl
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from isthmus.distill.evaluation.metrics import interleaved
from isthmus.distill.export.acceptance import finite
from isthmus.distill.export.candidate import Candidate, ParityLimits, StudentReference, sample_cases
from isthmus.distill.export.conversion import in_ort_format, in_precision
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.restore import legacy_origins, provenance
from isthmus.distill.search.trials import Budget, SearchTrial
from isthmus.distill.tasks.graph import student_graph
from isthmus.distill.tasks.task import Task
from isthmus.distill.training.checkpoint import copy_weights, discard
from isthmus.distill.training.studentrun import train_student
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import DataError, DependencyError, GateFailed, ParityFailed, Stopped
from isthmus.features.files import write_atomically
from isthmus.features.profiles import ServingProfile
from isthmus.features.progress import Progress

FEW, MANY = 500, 2000
"""Calls per round of a latency measurement.

FEW is for an untrained graph, and for many graphs that are compared. MANY is for one trained graph.
"""


@dataclass(eq=False)
class Bench:
    """Measures and trains the students of a search.

    `weights` is the folder of trained students, which several searches may share. `graphs` is the folder of this
    search's graphs, and `runs` the folder of temporary checkpoints.
    """

    task: Task
    outputs: OutputCache
    profile: ServingProfile
    budget: Budget
    weights: Path
    graphs: Path
    runs: Path

    def __post_init__(self) -> None:
        task, material = self.task, self.task.material
        self._validation = material.parts.validation
        self._teacher = self.outputs.float32(self._validation)
        settings = material.declaration.search_settings(material.profile, len(material.parts.train))
        self._settings = replace(
            settings, gate=f"validation_{task.metric}",
            best="max" if task.more else "min", seed=material.declaration.seed,
        )  # fmt: skip

    def measure(self, number: int, shape: Mapping[str, Any], precision: str, progress: Progress) -> SearchTrial:
        """Measure the cost of an untrained student, train it if it fits the budget, and return the result as a trial.

        Saves the trained weights, or loads them if an earlier search trained the same student. Waits while another
        search trains it. Writes a trained student's graph to `graphs/<number>.ort`. A student that raises an error gets
        a trial with the status "failed". Raises an error only if the disk is full, if a signal stops the search
        (`Stopped`), or for a DependencyError that may pass.

        Args:
            number: number of the trial in the search, from 0.
            shape: the student's options by name.
            precision: precision of the graph to measure, "fp32" or "int8".
            progress: called with a text and the finished share.
        """
        began, facts = time.perf_counter(), dict[str, Any]()
        try:
            candidate = self._fill(facts, self.task.with_shape(shape), precision, progress)
            if candidate is not None:
                write_atomically(self.graphs / f"{number}.ort", candidate.model)
        except Stopped:
            raise
        except Exception as error:  # the task's own code may raise anything
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or (isinstance(error, DependencyError) and error.passes):
                raise
            facts |= {"status": "failed", "why": str(error) or type(error).__name__, "score": None}
        facts["seconds"] = round(time.perf_counter() - began, 3)
        return SearchTrial(number=number, shape=dict(shape), precision=precision, **facts)

    def side_by_side(self, trials: Sequence[SearchTrial]) -> list[SearchTrial]:
        calls = {}
        for trial in trials:
            if trial.status == "trained":
                row = self.task.with_shape(trial.shape).feeds(self._validation[:1])
                file = self.graphs / f"{trial.number}.ort"
                try:
                    calls[f"{trial.number}"] = Candidate(file.read_bytes(), self.profile.threads).call(row)
                except OSError as error:
                    remedy = f"remove {file.parents[1]} to search again; trained students stay cached"
                    raise DataError(str(file), f"cannot be read: {error}", remedy=remedy) from error
        times = interleaved(calls, calls=FEW, seconds=0.5)
        p50 = {trial.number: trial.p50_us for trial in trials}
        p50 |= {int(number): figures["p50_us"] for number, figures in times.items()}
        return [msgspec.structs.replace(trial, p50_us=p50[trial.number]) for trial in trials]

    def _fill(self, facts: dict[str, Any], task: Task, precision: str, progress: Progress) -> Candidate | None:
        """Measure a student, and train it if it fits the budget; return its graph, or None if it does not fit.

        Adds each figure to `facts` as soon as it is known, so that a failed trial keeps it.
        """
        student = self._new(task).eval()
        facts["parameters"] = sum(weights.numel() for weights in student.parameters())
        self._measure_cost(facts, task, student, precision, FEW)
        if facts["status"] == "over budget":
            return None
        student = self._trained(task, progress)
        candidate = self._measure_cost(facts, task, student, precision, MANY)
        cases = [*sample_cases(task, student, self._validation), *task.edges(student)]
        reference = StudentReference(task, self._validation, self._teacher, (), cases)
        _, deviations = reference.compare(candidate.run, ParityLimits.of(task, student, self._validation), precision)
        far = max(deviations, key=lambda each: each.share)
        words = f"{far.place}: {far.message('the student in torch')}"
        if not math.isfinite(far.share):
            raise ParityFailed(f"its graph in {precision}", words)
        facts["difference"] = max(each.by for each in deviations)
        if far.share > 1:  # `export` leaves this precision out
            facts["over"]["difference"] = far.share - 1
            words += f"; at most {far.limit:.3g} is allowed"
            facts |= {"why": "; ".join(filter(None, (facts["why"], words))), "status": "over budget"}
        quality = reference.quality(candidate.run)
        score = quality[task.metric]
        if not math.isfinite(score):
            raise GateFailed("validation part", f"{task.metric} is {score}", expected="a finite number")
        facts |= {"score": score, "quality": finite(quality)}
        return candidate

    def _new(self, task: Task) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            return task.student()

    def _measure_cost(
        self, facts: dict[str, Any], task: Task, student: nn.Module, precision: str, calls: int
    ) -> Candidate:
        with torch.no_grad():
            graph = in_precision(task, student_graph(task, student), precision, task.edges(student))
        candidate, row = (
            Candidate(in_ort_format(graph, precision), self.profile.threads),
            task.feeds(self._validation[:1]),
        )
        call = candidate.call(row)
        (times,) = interleaved({"": call}, calls=calls).values()
        if times["p99_us"] / 1000 > self.budget.p99_ms:
            # A short load peak on the machine must not rule out a student for good.
            times = min(times, *interleaved({"": call}, calls=MANY).values(), key=lambda measured: measured["p99_us"])
        # Measure once: a process takes seconds to start, and trained weights do not change its cost.
        if "memory_mb" not in facts:
            facts |= msgspec.structs.asdict(candidate.footprint(row, self.budget.load_ms))
        over = self.budget.exceeded(
            p99_us=times["p99_us"], memory_mb=facts["memory_mb"], load_ms=facts["load_ms"],
            files=(len(candidate.model), len(graph)),
        )  # fmt: skip
        facts |= {"bytes": len(candidate.model), **times}
        facts["over"] = {name: share for name, (share, _) in over.items()}
        facts["why"] = "; ".join(words for _, words in over.values())
        facts["status"] = "over budget" if over else "trained"
        return candidate

    def _trained(self, task: Task, progress: Progress) -> nn.Module:
        """Return a trained student of the task's shape: load it, or train it once for all precisions and budgets."""
        origin, depends = provenance(task), {
            "contract": task.material.contract, "shape": dict(task.shape),
            "settings": self._settings.identity(), "outputs": self.outputs.path.name,
            "profile": task.material.profile.identity(), "torch": torch.__version__,
        }  # fmt: skip
        # Earlier versions hashed all of the task's code into the name of a student.
        former, key = (
            sha256({"made_of": made_of, **depends})[:16] for made_of in (legacy_origins(origin), origin["training"])
        )
        file, student = self.weights / f"{key}.safetensors", self._new(task)
        if not file.exists() and (self.weights / f"{former}.safetensors").exists():
            file = self.weights / f"{former}.safetensors"
        with _exclusive(self.runs / key / "lock", progress):
            try:
                student.load_state_dict(load_file(file))
            except (OSError, RuntimeError, SafetensorError):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self._settings.seed)
                    student, objective = task.student(), task.objective()
                train_student(task, student, objective, self.outputs, self._settings, self.runs / key, progress)
                weights = {name: value.contiguous() for name, value in copy_weights(student).items()}
                write_atomically(file, save(weights))
                discard(self.runs / key)
        return student.eval().requires_grad_(requires_grad=False)


@contextmanager
def _exclusive(lock: Path, progress: Progress) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another search that trains the same student", 0.0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
