"""The step: students of many shapes, each measured as it would be served, and the best of them.

A graph costs what it costs whatever its weights are. So it is measured first, without training, and a student that does
not keep to the budget is not trained at all.
"""

import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from isthmus.distill.account import Progress
from isthmus.distill.checkpoint import copied, discard
from isthmus.distill.declaration import Search
from isthmus.distill.device import accelerator
from isthmus.distill.evaluate import interleaved
from isthmus.distill.export import in_precision, plain
from isthmus.distill.footprint import footprint
from isthmus.distill.golden import spread
from isthmus.distill.kind import made, origins, require_shape
from isthmus.distill.lessons import teach
from isthmus.distill.outputs.outputs import TeacherOutputs
from isthmus.distill.pareto import front
from isthmus.distill.proposal import Known, proposed
from isthmus.distill.rehearsal import rehearse
from isthmus.distill.runtime import ask, ort_format, predict, session
from isthmus.distill.task import Material, Task, replied_all
from isthmus.distill.teaching import taught
from isthmus.distill.trial import difference
from isthmus.distill.tried import Budget, Journal, Tried, nearest, recommended, shaped
from isthmus.features.contract import sha256
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, GateFailed, Problem, Stopped
from isthmus.features.files import write_atomically
from isthmus.features.profiles import FASTEST, ServingProfile

FORMAT = 1
JOURNAL = "tried.jsonl"
FEW, MANY = 500, 2000
"""Calls of a round when latency is measured: of a graph without training or of many, and of a trained one."""
REPORT = "search.json"
PRECISION = "precision"


@dataclass(frozen=True)
class SearchReport:
    """What a search found.

    Attributes:
        path: its folder.
        data: everything it says, as plain data (docs/search.md).
    """

    path: Path
    data: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The report with the path."""
        return {**self.data, "path": str(self.path)}


def search(
    material: Material,
    *,
    folder: Path,
    cache: Path,
    runs: Path,
    profile: ServingProfile,
    trials: int | None = None,
    progress: Progress = lambda _text, _done: None,
) -> SearchReport:
    """Tries students until there are as many as declared, those of earlier calls included.

    Args:
        material: what to learn from, and how.
        folder: of the searches: each has a folder there, named by a digest of all that it depends on.
        cache: of the teacher's outputs.
        runs: checkpoints of the training at hand.
        profile: how a student is served, and what it may take.
        trials: how many, if not as declared.
        progress: is told what is done and the share of all that is done.

    Raises:
        ConfigurationError: values of the declaration are wrong, or no search is declared, or the student is not made
            with what is searched.
        DataError: the table does not hold what was declared, or the file of the search is damaged.
        DependencyError: the profile asks for what this machine lacks, the disk is full, or another process searches.
        Stopped: by SIGINT or SIGTERM while a student learned; the same call goes on from there.
    """
    declared = material.declaration
    if problems := declared.problems():
        raise ConfigurationError(declared.where, problems)
    asked, where = declared.search, f"{declared.where}: search"
    if asked is None:
        problem = Problem("search", "is not declared", "Distillation(search=Search(shape={...}))")
        raise ConfigurationError(declared.where, [problem])
    most = asked.trials if trials is None else trials
    if most < 1:
        raise ConfigurationError(where, [Problem("trials", str(most), "at least 1")])
    task = made(material)
    require_shape(task, asked.shape, where)
    rows = np.arange(material.table.num_rows)
    outputs, facts = taught(
        task, task.teacher(), rows, cache, lambda text, done: progress(f"teacher, {text}", 0.2 * done)
    )
    rehearse(task, outputs, facts, declared.tried(material.profile), [*task.references()])
    space = {**asked.shape, PRECISION: _precisions(task, profile)}
    budget = Budget(
        profile.latency_objective_ms, profile.memory_mb, profile.load_ms, profile.package_kb, asked.most_bytes,
        facts.bytes,
    )  # fmt: skip
    identity = _identity(task, asked, outputs, profile)
    own = folder / identity
    bench = _Bench(task, outputs, profile, budget, folder / "students", own / "graphs", runs)
    journal = Journal(own / JOURNAL)
    with journal.held() as tried:
        while len(tried) < most:
            known = [_known(one, space, more=task.more) for one in tried]
            place = proposed(known, {name: len(values) for name, values in space.items()}, asked.seed)
            if place is None:
                progress(f"all {len(tried)} students that there are have been tried", 1.0)
                break
            shape = shaped(place, space)
            precision = shape.pop(PRECISION)
            began = 0.2 + 0.8 * len(tried) / most
            told = _within(progress, f"student {len(tried) + 1} of {most}", began, 0.8 / most)
            one = bench.tried(len(tried), shape, precision, told)
            journal.add(one)
            tried.append(one)
            told(f"{one.name}: {_told(one, task)}", 1.0)
        if (before := _told_before(own / REPORT, len(tried))) is not None:
            return SearchReport(own, before)
        progress("measured side by side", 1.0)
        data = _report(task, bench.side_by_side(tried), identity, space, budget, profile)
        write_atomically(own / REPORT, json.dumps(data, indent=2, allow_nan=False).encode())
    return SearchReport(own, data)


def _told_before(file: Path, count: int) -> dict[str, Any] | None:
    """The report of so many students, if there is one: what has been measured side by side is not measured again."""
    with suppress(OSError, msgspec.DecodeError, LookupError):
        data = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        return data if len(data["tried"]) == count else None
    return None


def require_fit(data: Mapping[str, Any]) -> None:
    """Refuses the report of a search in which no student was trained that keeps to the budget.

    Raises:
        GateFailed: with the nearest miss.
    """
    if data["recommended"] is not None:
        return
    tried = msgspec.convert(data["tried"], list[Tried])
    where, count = f"distillation {data['name']}: search", f"none of {len(tried)} students"
    if missed := nearest(tried):
        raise GateFailed(
            where,
            f"{count} keeps to the budget; nearest is {missed.name}: {missed.why}",
            expected=data["budget"]["words"],
            remedy="search among smaller students, allow more in [profiles.serving] and `most_bytes`, or measure on a "
            "machine that does nothing else",
        )
    raise GateFailed(where, f"{count} could be trained; the first: {tried[0].why}", remedy="correct the task")


class _Bench:
    """Where students are built, measured and trained."""

    def __init__(
        self, task: Task, outputs: TeacherOutputs, profile: ServingProfile, budget: Budget, kept: Path, graphs: Path,
        runs: Path,
    ) -> None:  # fmt: skip
        self._task, self._outputs, self._profile, self._budget = task, outputs, profile, budget
        self._kept, self._graphs, self._runs = kept, graphs, runs
        self._declared = dict(task.shape)
        self._validation = task.material.parts.validation
        self._said = {key: tensor.float().numpy() for key, tensor in outputs[self._validation].items()}
        settings = task.material.declaration.tried(task.material.profile)
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
            if isinstance(error, DependencyError) and error.passes:
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
        quality = self._task.quality(replied_all(self._task, run, self._validation), self._validation, self._said)
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
            found |= msgspec.structs.asdict(footprint(model, row, threads))
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
            "profile": dataclasses.asdict(task.material.profile), "torch": torch.__version__,
        })[:16]  # fmt: skip
        file, student = self._kept / f"{key}.safetensors", self._new()
        try:
            student.load_state_dict(load_file(file))
        except (OSError, RuntimeError, SafetensorError):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._settings.seed)
                student, objective = task.student(), task.objective()
            teach(
                task, student, objective, self._outputs, self._settings, accelerator(task.material.profile),
                self._runs / key, progress,
            )  # fmt: skip
            write_atomically(file, save({name: value.contiguous() for name, value in copied(student).items()}))
            discard(self._runs / key)
        return student.eval().requires_grad_(requires_grad=False)

    def _compare(self, found: dict[str, Any], student: nn.Module, run: Any, precision: str) -> None:
        """Holds the graph's answers against the student's in torch: `export` leaves out what is too far away."""
        task = self._task
        some = self._validation[spread(len(self._validation), task.compared)]
        parts = (some[begin : begin + task.at_once] for begin in range(0, len(some), task.at_once))
        cases = [*(task.case(student, part) for part in parts), *task.edges(student)]
        apart = float(np.max([difference(case.expected, run(case.feeds)) for case in cases]))
        tolerance = task.tolerance[precision]
        if not math.isfinite(apart):
            raise GateFailed(f"its graph in {precision}", "answers are no numbers, or have other sizes than in torch")
        found["apart"] = apart
        if apart > tolerance:
            words = f"answers differ from the student's in torch by up to {apart:.2g}, at most {tolerance:g}"
            found["over"]["difference"] = apart / tolerance - 1
            found |= {"why": "; ".join(filter(None, (found["why"], words))), "status": "over budget"}


def _precisions(task: Task, profile: ServingProfile) -> list[str]:
    return [one for one in task.tolerance if profile.precision in (one, FASTEST)]


def _identity(task: Task, asked: Search, outputs: TeacherOutputs, profile: ServingProfile) -> str:
    """Of a search: a digest of everything its findings depend on."""
    material = task.material
    return sha256({
        "format": FORMAT,
        "contract": material.contract,
        "made_of": origins(task),
        "seed": [material.declaration.seed, asked.seed],
        "shape": {name: list(values) for name, values in asked.shape.items()},
        "most_bytes": asked.most_bytes,
        "settings": material.declaration.tried(material.profile).identity(),
        "outputs": outputs.path.name,
        "profiles": [dataclasses.asdict(material.profile), dataclasses.asdict(profile)],
        "versions": [torch.__version__, onnxruntime.__version__],
    })[:12]  # fmt: skip


def _known(one: Tried, space: Mapping[str, Sequence[Any]], *, more: bool) -> Known:
    values = {**one.shape, PRECISION: one.precision}
    # As JSON has them: a tuple is a list there.
    place = tuple([json.dumps(value) for value in space[name]].index(json.dumps(values[name])) for name in space)
    return Known(place, _aims(one, more=more), one.over)


def _aims(one: Tried, *, more: bool) -> tuple[float, float, float] | None:
    """What a student is good for, less being better: quality, median latency and bytes."""
    if one.score is None or one.p50_us is None or one.bytes is None:
        return None
    return (-one.score if more else one.score), one.p50_us, float(one.bytes)


def _report(
    task: Task,
    tried: Sequence[Tried],
    identity: str,
    space: Mapping[str, Sequence[Any]],
    budget: Budget,
    profile: ServingProfile,
) -> dict[str, Any]:
    fit = [one for one in tried if one.status == "trained"]
    aims = np.array([_aims(one, more=task.more) for one in fit], float).reshape(-1, 3)
    best, lines = recommended(tried, more=task.more), {}
    if best is not None:
        # As declared: what comes from the file has lists for tuples.
        values = shaped(_known(best, space, more=task.more).place, space)
        before, task.shape = task.shape, {**task.shape, **{name: values[name] for name in best.shape}}
        lines = {"definitions.py": task.line()}
        task.shape = before
        if profile.precision == FASTEST:
            lines["isthmus.toml"] = f'[profiles.serving]\nprecision = "{best.precision}"'
    return {
        "format": FORMAT,
        "id": identity,
        "name": task.material.declaration.name,
        "metric": task.metric,
        "more": task.more,
        "rows": len(task.material.parts.validation),
        "budget": {**dataclasses.asdict(budget), "words": str(budget)},
        "space": {name: list(values) for name, values in space.items()},
        "threads": profile.threads,
        "runtime": f"ONNX Runtime {onnxruntime.__version__}",
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "tried": [msgspec.to_builtins(one) for one in tried],
        "front": [one.number for one, on in zip(fit, front(aims), strict=True) if on],
        "recommended": None if best is None else best.number,
        "lines": lines,
    }


def _told(one: Tried, task: Task) -> str:
    if one.status != "trained":
        return f"{one.status}, {one.why}"
    return f"{task.metric} {one.score:.4f}, p50 {one.p50_us:,.0f} µs, {one.bytes:,} bytes"


def _within(progress: Progress, name: str, begun: float, share: float) -> Progress:
    return lambda text, done: progress(f"{name}, {text}", begun + share * done)
