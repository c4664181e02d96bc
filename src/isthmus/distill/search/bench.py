"""Where students are built, measured as they would be served, and trained."""

import errno
import fcntl
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from isthmus.distill.device import accelerator
from isthmus.distill.evaluation.metrics import interleaved
from isthmus.distill.export.acceptance import difference, require_said
from isthmus.distill.export.export import in_precision, plain
from isthmus.distill.onnx.footprint import footprint
from isthmus.distill.onnx.runtime import ask, ort_format, predict, session
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.restore import origins
from isthmus.distill.search.trials import Budget, Tried
from isthmus.distill.tasks.task import Task, graph_answers
from isthmus.distill.training.checkpoint import copy_weights, discard
from isthmus.distill.training.studentrun import train_student
from isthmus.distill.types import spread
from isthmus.features.contract.contract import sha256
from isthmus.features.errors import DataError, DependencyError, GateFailed, Stopped
from isthmus.features.files import write_atomically
from isthmus.features.profiles import ServingProfile
from isthmus.features.progress import Progress

FEW, MANY = 500, 2000
"""Calls of a round when latency is measured: of a graph without training or of many, and of a trained one."""


class Bench:
    """Builds, measures and trains students of a task.

    Args:
        task: whose students.
        outputs: of the teacher for all rows.
        profile: how a student is served.
        budget: what it may take.
        kept: folder of the weights of trained students.
        graphs: folder of the graphs of those that keep to the budget, by number.
        runs: folder of checkpoints.
    """

    def __init__(
        self, task: Task, outputs: TeacherOutputs, profile: ServingProfile, budget: Budget, kept: Path, graphs: Path,
        runs: Path,
    ) -> None:  # fmt: skip
        self._task, self._outputs, self._profile, self._budget = task, outputs, profile, budget
        self._kept, self._graphs, self._runs = kept, graphs, runs
        self._declared = dict(task.shape)
        self._validation = task.material.parts.validation
        self._said = {key: tensor.float().numpy() for key, tensor in outputs[self._validation].items()}
        settings = task.material.declaration.search_settings(task.material.profile)
        self._settings = replace(
            settings, gate=f"validation_{task.metric}", best="max" if task.more else "min",
            seed=task.material.declaration.seed,
        )  # fmt: skip

    def tried(self, number: int, shape: Mapping[str, Any], precision: str, progress: Progress) -> Tried:
        """A student: built, measured, and if it keeps to the budget trained, exported and measured again."""
        began, found = time.perf_counter(), dict[str, Any]()
        self._task.shape = {**self._declared, **shape}
        try:
            model = self._fill(found, precision, progress)
            if model is not None:
                write_atomically(self._graphs / f"{number}.ort", model)
        except Stopped:
            raise
        except Exception as error:  # the task's own code may raise anything
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or (isinstance(error, DependencyError) and error.passes):
                raise
            found |= {"status": "failed", "why": str(error) or type(error).__name__, "score": None}
        finally:
            self._task.shape = self._declared
        found["seconds"] = round(time.perf_counter() - began, 3)
        return Tried(number=number, shape=dict(shape), precision=precision, **found)

    def side_by_side(self, tried: Sequence[Tried]) -> list[Tried]:
        """All with the p50 that they have in turn, of those that keep to the budget: else it is that of its moment.

        Raises:
            DataError: a graph is gone.
        """
        row, calls = self._task.feeds(self._validation[:1]), {}
        for one in tried:
            if one.status == "trained":
                file = self._graphs / f"{one.number}.ort"
                try:
                    opened = session(file.read_bytes(), self._profile.threads)
                except OSError as error:
                    remedy = f"remove {file.parents[1]} to search anew; trained students are kept"
                    raise DataError(str(file), f"cannot be read: {error}", remedy=remedy) from error
                calls[f"{one.number}"] = partial(predict, opened, row)
        times = interleaved(calls, calls=FEW, seconds=0.5)
        return [
            msgspec.structs.replace(one, p50_us=times[f"{one.number}"]["p50_us"]) if f"{one.number}" in times else one
            for one in tried
        ]

    def _fill(self, found: dict[str, Any], precision: str, progress: Progress) -> bytes | None:
        """Says what is known of the student, as soon as it is: all that `Tried` has. Gives its graph, if trained."""
        student = self._new().eval()
        found["parameters"] = sum(weights.numel() for weights in student.parameters())
        self._cost(found, student, precision, FEW)
        if found["status"] == "over budget":
            return None
        student = self._trained(progress)
        model = self._cost(found, student, precision, MANY)
        run = partial(ask, session(model, self._profile.threads))
        self._compare(found, student, run, precision)
        quality = self._task.quality(graph_answers(self._task, run, self._validation), self._validation, self._said)
        score = quality[self._task.metric]
        if not math.isfinite(score):
            raise GateFailed("validation part", f"{self._task.metric} is {score}", expected="a finite number")
        finite = {name: value if math.isfinite(value) else None for name, value in quality.items()}
        found |= {"score": score, "quality": finite}
        return model

    def _new(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            return self._task.student()

    def _cost(self, found: dict[str, Any], student: nn.Module, precision: str, calls: int) -> bytes:
        """Measures a student's graph in ONNX Runtime, and holds it against the budget."""
        task, threads = self._task, self._profile.threads
        with torch.no_grad():
            graph = in_precision(task, plain(task, student), precision, task.edges(student))
        model, row = ort_format(graph), task.feeds(self._validation[:1])
        answer = partial(predict, session(model, threads), row)
        (times,) = interleaved({"": answer}, calls=calls).values()
        if times["p99_us"] / 1000 > self._budget.p99_ms:
            # What else the machine did for a moment must not refuse a student for good.
            times = min(times, *interleaved({"": answer}, calls=MANY).values(), key=lambda one: one["p99_us"])
        # A process takes seconds to start, and the weights do not change what it needs.
        if "memory_mb" not in found:
            found |= msgspec.structs.asdict(footprint(model, row, threads, self._budget.load_ms))
        over = self._budget.over(
            p99_us=times["p99_us"], memory_mb=found["memory_mb"], load_ms=found["load_ms"],
            files=(len(model), len(graph)),
            weights=sum(weights.nbytes for weights in student.parameters()),
        )  # fmt: skip
        found |= {"bytes": len(model), **times}
        found["over"] = {name: share for name, (share, _) in over.items()}
        found["why"] = "; ".join(words for _, words in over.values())
        found["status"] = "over budget" if over else "trained"
        return model

    def _trained(self, progress: Progress) -> nn.Module:
        """A student of the task's shape, trained; only once, however many precisions and budgets it is tried for."""
        task = self._task
        key = sha256({
            "made_of": origins(task), "contract": task.material.contract, "shape": dict(task.shape),
            "settings": self._settings.identity(), "outputs": self._outputs.path.name,
            "profile": task.material.profile.identity(), "torch": torch.__version__,
        })[:16]  # fmt: skip
        file, student = self._kept / f"{key}.safetensors", self._new()
        with _alone(self._runs / key / "lock", progress):
            try:
                student.load_state_dict(load_file(file))
            except (OSError, RuntimeError, SafetensorError):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self._settings.seed)
                    student, objective = task.student(), task.objective()
                train_student(
                    task, student, objective, self._outputs, self._settings, accelerator(task.material.profile),
                    self._runs / key, progress,
                )  # fmt: skip
                write_atomically(
                    file, save({name: value.contiguous() for name, value in copy_weights(student).items()})
                )
                discard(self._runs / key)
        return student.eval().requires_grad_(requires_grad=False)

    def _compare(self, found: dict[str, Any], student: nn.Module, run: Any, precision: str) -> None:
        """Holds the graph's answers against the student's in torch: `export` leaves out what is too far away."""
        task = self._task
        some = self._validation[spread(len(self._validation), task.compared)]
        parts = (some[begin : begin + task.at_once] for begin in range(0, len(some), task.at_once))
        cases = [*(task.case(student, part) for part in parts), *task.edges(student)]
        answers = [run(case.feeds) for case in cases]
        require_said(task, cases[0].expected, answers[0])
        apart = float(np.max([difference(case.expected, answer) for case, answer in zip(cases, answers, strict=True)]))
        tolerance = task.tolerance[precision]
        if not math.isfinite(apart):
            raise GateFailed(f"its graph in {precision}", "answers are no numbers, or have other sizes than in torch")
        found["apart"] = apart
        if apart > tolerance:
            words = f"answers differ from the student's in torch by up to {apart:.2g}, at most {tolerance:g}"
            found["over"]["difference"] = apart / tolerance - 1
            found |= {"why": "; ".join(filter(None, (found["why"], words))), "status": "over budget"}


@contextmanager
def _alone(lock: Path, progress: Progress) -> Iterator[None]:
    """Within the block no other search, under another budget, trains the same student in the same place."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waits for another search, which trains the same", 0.0)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
