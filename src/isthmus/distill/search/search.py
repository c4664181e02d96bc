"""The search step: measures students of many shapes, trains those within the budget, and recommends the best."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch

from isthmus.distill.declaration import Search
from isthmus.distill.export.acceptance import allowed_precisions, exported_precisions
from isthmus.distill.onnx.host import host
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.preflight import rehearse, require_measured
from isthmus.distill.restore import create_task, legacy_origins, provenance, require_shape
from isthmus.distill.search.bench import Bench
from isthmus.distill.search.sampler import StudentTrial, propose
from isthmus.distill.search.trials import FORMAT, Budget, SearchTrial, Trials, front, nearest, recommended, values_at
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.training.teacheroutputs import complete_outputs, open_outputs
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import ConfigurationError, GateFailed, Problem
from isthmus.features.files import write_atomically
from isthmus.features.profiles import FASTEST, SMALLEST, ServingProfile
from isthmus.features.progress import Progress, silent

JOURNAL = "tried.jsonl"
REPORT = "search.json"
HOST = "host.json"
PRECISION = "precision"


@dataclass(frozen=True)
class SearchReport:
    """The result of a search: its folder, and the content of `search.json` as plain data (docs/search.md)."""

    path: Path
    data: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {**self.data, "path": str(self.path)}


def search(  # noqa: PLR0913 - a step, and each argument is a choice of its caller
    material: Material,
    *,
    folder: Path,
    cache: Path,
    runs: Path,
    profile: ServingProfile,
    trials: int | None = None,
    progress: Progress = silent,
) -> SearchReport:
    """Search for the best student within a budget; write a report of all measured students, and return it.

    Computes the teacher's missing outputs, then measures students until there are `trials`, and trains each one that
    fits the budget. A student that fails is recorded, and raises nothing. The report is `search.json`. Earlier calls
    count: if they measured enough students, return their report. Raise no error if no student fits the budget: call
    `require_fit` to check this.

    Args:
        material: declaration and training set.
        folder: folder of searches. Each search has a subfolder, named by a digest of this machine and everything that
            the search depends on. The weights of all students are in the subfolder `students`.
        cache: folder of cached teacher outputs.
        runs: folder for temporary checkpoints of training runs.
        profile: limits, precision and threads for serving.
        trials: number of students to measure, earlier calls included; None for the declared number.
        progress: called with a text and the finished share.

    Raises:
        ConfigurationError: the declaration is invalid, or has no search.
        DataError: the training set does not fit the task, or an input reveals the label on its own.
        DependencyError: a device or disk space is missing, or another process runs this search.
        GateFailed: the first loss is not finite.
        Stopped: on SIGINT or SIGTERM. The same call continues the search.
    """
    declared, count = _declared(material, trials)
    task = create_task(material)
    require_shape(task, declared.shape, f"{material.declaration.where}: search")
    space = {**declared.shape, PRECISION: allowed_precisions(exported_precisions(task.tolerance, profile), profile)}
    outputs = _teacher_outputs(task, cache, progress)
    budget = Budget(
        profile.latency_objective_ms, profile.memory_mb, profile.load_ms, profile.package_kb, declared.most_bytes
    )
    machine, digest = host(), sha256(_dependencies(task, declared, outputs, profile))
    own = folder / sha256({"search": digest, "host": machine})[:12]
    _record_host(own, digest, machine, progress)
    bench = Bench(task, outputs, profile, budget, folder / "students", own / "graphs", runs)
    current = _Search(bench, declared.seed, space, own)
    journal = Trials(own / JOURNAL)
    with journal.locked() as done:
        for trial in current.trials(done, count, progress):
            journal.add(trial)
        if (before := _previous_report(own / REPORT, done)) is not None:
            return SearchReport(own, before)
        progress("measured side by side", 1.0)
        data = current.report(bench.side_by_side(done))
        write_atomically(own / REPORT, json.dumps(data, indent=2, allow_nan=False).encode())
    return SearchReport(own, data)


def require_fit(data: Mapping[str, Any]) -> None:
    if data["recommended"] is not None:
        return
    trials = msgspec.convert(data["tried"], list[SearchTrial])
    where, count = f"distillation {data['name']}: search", f"none of {len(trials)} students"
    if missed := nearest(trials):
        raise GateFailed(
            where,
            f"{count} fit the budget; nearest is {missed.name}: {missed.why}",
            expected=data["budget"]["words"],
            remedy="search smaller students, raise the limits in [profiles.serving] and `most_bytes`, or measure on an "
            "idle machine",
        )
    raise GateFailed(where, f"{count} could be trained; the first: {trials[0].why}", remedy="fix the task")


def _declared(material: Material, trials: int | None) -> tuple[Search, int]:
    declaration = material.declaration
    if problems := declaration.problems():
        raise ConfigurationError(declaration.where, problems)
    if declaration.search is None:
        problem = Problem("search", "is not declared", "Distillation(search=Search(shape={...}))")
        raise ConfigurationError(declaration.where, [problem])
    count = declaration.search.trials if trials is None else trials
    if count < 1:
        raise ConfigurationError(f"{declaration.where}: search", [Problem("trials", str(count), "at least 1")])
    return declaration.search, count


def _teacher_outputs(task: Task, cache: Path, progress: Progress) -> OutputCache:
    material, teacher, report = task.material, task.teacher(), _within(progress, "teacher", 0.0, 0.2)
    rows, settings = (
        np.arange(task.material.table.num_rows),
        material.declaration.search_settings(material.profile, len(material.parts.train)),
    )
    outputs = open_outputs(task, teacher, rows, cache, report)
    with outputs:  # saves the teacher's outputs even on an error
        rehearse(task, teacher, outputs, settings, lambda text: progress(text, 0.0))
        outputs, _ = complete_outputs(task, teacher, rows, cache, report, outputs)
    require_measured(task, outputs, task.references())
    return outputs


class _HostRecord(msgspec.Struct, frozen=True):
    search: str
    host: str


def _record_host(own: Path, digest: str, machine: str, progress: Progress) -> None:
    """Record this machine; report other machines with the same search, since their figures are not comparable."""
    hosts = []
    for file in sorted(own.parent.glob(f"*/{HOST}")):
        with suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(file.read_bytes(), type=_HostRecord)
            if record.search == digest:
                hosts.append(record.host)
    if machine in hosts:
        return
    if hosts:
        progress(
            f"earlier figures are from {' and '.join(hosts)}, not from this host, {machine}: all students are measured "
            "again here; cached weights are reused", 0.2
        )  # fmt: skip
    write_atomically(own / HOST, msgspec.json.encode(_HostRecord(digest, machine)))


def _dependencies(task: Task, declared: Search, outputs: OutputCache, profile: ServingProfile) -> dict[str, Any]:
    material = task.material
    return {
        "format": FORMAT,
        "contract": material.contract,
        "made_of": legacy_origins(provenance(task)),
        "seed": [material.declaration.seed, declared.seed],
        "shape": {name: list(values) for name, values in declared.shape.items()},
        "most_bytes": declared.most_bytes,
        "settings": material.declaration.search_settings(material.profile, len(material.parts.train)).identity(),
        "outputs": outputs.path.name,
        "profiles": [material.profile.identity(), profile.identity()],
        "versions": [torch.__version__, onnxruntime.__version__],
    }


@dataclass(frozen=True, eq=False)
class _Search:
    bench: Bench
    seed: int
    space: Mapping[str, Sequence[Any]]
    folder: Path

    def trials(self, done: list[SearchTrial], count: int, progress: Progress) -> Iterator[SearchTrial]:
        sizes = {name: len(values) for name, values in self.space.items()}
        while len(done) < count:
            place = propose([self.known(trial) for trial in done], sizes, self.seed)
            if place is None:
                progress(f"all {len(done)} possible students have been measured", 1.0)
                return
            shape = values_at(place, self.space)
            precision, share = shape.pop(PRECISION), 0.8 / count
            report = _within(progress, f"student {len(done) + 1} of {count}", 0.2 + share * len(done), share)
            trial = self.bench.measure(len(done), shape, precision, report)
            yield trial
            done.append(trial)
            report(f"{trial.name}: {self.summary(trial)}", 1.0)

    def known(self, trial: SearchTrial) -> StudentTrial:
        values = {**trial.shape, PRECISION: trial.precision}
        # Compare as JSON, where tuples and lists are the same.
        place = tuple(
            [json.dumps(value) for value in choices].index(json.dumps(values[name]))
            for name, choices in self.space.items()
        )
        return StudentTrial(place, self.objectives(trial), trial.over)

    def objectives(self, trial: SearchTrial) -> tuple[float, float, float] | None:
        if trial.score is None or trial.p50_us is None or trial.bytes is None:
            return None
        return (-trial.score if self.bench.task.more else trial.score), trial.p50_us, float(trial.bytes)

    def summary(self, trial: SearchTrial) -> str:
        if trial.status != "trained":
            return f"{trial.status}, {trial.why}"
        return f"{self.bench.task.metric} {trial.score:.4f}, p50 {trial.p50_us:,.0f} µs, {trial.bytes:,} bytes"

    def report(self, trials: Sequence[SearchTrial]) -> dict[str, Any]:
        task, budget = self.bench.task, self.bench.budget
        best = recommended(trials, more=task.more)
        fit = [trial for trial in trials if trial.status == "trained"]
        points = np.array([self.objectives(trial) for trial in fit], float).reshape(-1, 3)
        return {
            "format": FORMAT,
            "id": self.folder.name,
            "name": task.material.declaration.name,
            "metric": task.metric,
            "more": task.more,
            "rows": len(task.material.parts.validation),
            "budget": {**dataclasses.asdict(budget), "words": str(budget)},
            "space": {name: list(values) for name, values in self.space.items()},
            "threads": self.bench.profile.threads,
            "runtime": f"ONNX Runtime {onnxruntime.__version__}",
            "host": host(),
            "tried": [msgspec.to_builtins(trial) for trial in trials],
            "front": [trial.number for trial, on in zip(fit, front(points), strict=True) if on],
            "recommended": None if best is None else best.number,
            "lines": {} if best is None else self.lines(best),
        }

    def lines(self, best: SearchTrial) -> dict[str, str]:
        # Use declared values: a trial from the journal has lists for tuples.
        values = values_at(self.known(best).place, self.space)
        lines = {"definitions.py": self.bench.task.with_shape({name: values[name] for name in best.shape}).line()}
        if self.bench.profile.precision in (FASTEST, SMALLEST):
            lines["isthmus.toml"] = f'[profiles.serving]\nprecision = "{best.precision}"'
        return lines


def _previous_report(file: Path, trials: Sequence[SearchTrial]) -> dict[str, Any] | None:

    def comparable(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{**record, "p50_us": None} for record in records]

    with suppress(OSError, msgspec.DecodeError, LookupError, TypeError):
        data = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        journal = msgspec.json.decode(msgspec.json.encode(trials))
        return data if comparable(data["tried"]) == comparable(journal) else None
    return None


def _within(progress: Progress, name: str, begin: float, share: float) -> Progress:
    return lambda text, done: progress(f"{name}, {text}", begin + share * done)
