"""The step: students of many shapes, each measured as it would be served, and the best of them.

The cost of a graph does not depend on its weights. So it is measured before training, and a student over the budget is
not trained at all.
"""

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
from isthmus.distill.export.acceptance import allowed_precisions
from isthmus.distill.onnx.host import host
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.preflight import rehearse, require_measured
from isthmus.distill.restore import create_task, origins, require_shape, whole
from isthmus.distill.search.bench import Bench
from isthmus.distill.search.sampler import Known, propose
from isthmus.distill.search.trials import FORMAT, Budget, Trial, Trials, front, nearest, recommended, values_at
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.training.teacheroutputs import TeacherCost, complete_outputs, open_outputs
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import ConfigurationError, GateFailed, Problem
from isthmus.features.files import write_atomically
from isthmus.features.profiles import FASTEST, ServingProfile
from isthmus.features.progress import Progress, silent

JOURNAL = "tried.jsonl"
REPORT = "search.json"
HOST = "host.json"
PRECISION = "precision"


@dataclass(frozen=True)
class SearchReport:
    """`search.json` as plain data (docs/search.md), in the folder of the search."""

    path: Path
    data: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The report with the path."""
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
    """Measures students until there are as many as declared, those of earlier calls included.

    Each search has a subfolder of `folder`, named by a digest of everything it depends on. `runs` is for checkpoints.

    Raises:
        ConfigurationError: the declaration is wrong, has no search, or searches a shape or precision that the task
            does not have.
        DataError: the table lacks what was declared, or the journal of the search is damaged.
        DependencyError: the machine lacks what the profile needs, the disk is full, or another process searches here.
        Stopped: by SIGINT or SIGTERM while a student was trained; the same call continues from there.
    """
    declared, count = _declared(material, trials)
    task = create_task(material)
    require_shape(task, declared.shape, f"{material.declaration.where}: search")
    space = {**declared.shape, PRECISION: allowed_precisions([*task.tolerance], profile)}
    outputs, cost = _teacher_outputs(task, cache, progress)
    budget = Budget(
        profile.latency_objective_ms, profile.memory_mb, profile.load_ms, profile.package_kb, declared.most_bytes,
        cost.most_parameters,
    )  # fmt: skip
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
    """Raises a GateFailed, with the nearest miss, if no trained student of a search fits the budget."""
    if data["recommended"] is not None:
        return
    trials = msgspec.convert(data["tried"], list[Trial])
    where, count = f"distillation {data['name']}: search", f"none of {len(trials)} students"
    if missed := nearest(trials):
        raise GateFailed(
            where,
            f"{count} keeps to the budget; nearest is {missed.name}: {missed.why}",
            expected=data["budget"]["words"],
            remedy="search among smaller students, allow more in [profiles.serving] and `most_bytes`, or measure on a "
            "machine that does nothing else",
        )
    raise GateFailed(where, f"{count} could be trained; the first: {trials[0].why}", remedy="correct the task")


def _declared(material: Material, trials: int | None) -> tuple[Search, int]:
    """The search of a declaration without problems, and the number of its students."""
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


def _teacher_outputs(task: Task, cache: Path, progress: Progress) -> tuple[TeacherOutputs, TeacherCost]:
    """The complete outputs, after all checks that a new student allows."""
    material, teacher, report = task.material, task.teacher(), _within(progress, "teacher", 0.0, 0.2)
    rows, settings = (
        np.arange(task.material.table.num_rows),
        material.declaration.search_settings(material.profile, len(material.parts.train)),
    )
    outputs = open_outputs(task, teacher, rows, cache, report)
    with outputs:  # keeps what the teacher has answered, whatever ends this
        rehearse(task, teacher, outputs, settings, lambda text: progress(text, 0.0))
        outputs, cost = complete_outputs(task, teacher, rows, cache, report, outputs)
    require_measured(task, outputs, cost, task.references())
    return outputs, cost


class _HostRecord(msgspec.Struct, frozen=True):
    """Beside a journal: a digest of the search, and its machine."""

    search: str
    host: str


def _record_host(own: Path, digest: str, machine: str, progress: Progress) -> None:
    """Also reports searches of the same on other machines: figures of two machines are never compared."""
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
            f"was searched on {' and on '.join(hosts)}, whose figures are not those of this host, {machine}: all "
            "students are measured anew here, and those whose weights are cached are not trained again", 0.2
        )  # fmt: skip
    write_atomically(own / HOST, msgspec.json.encode(_HostRecord(digest, machine)))


def _dependencies(task: Task, declared: Search, outputs: TeacherOutputs, profile: ServingProfile) -> dict[str, Any]:
    """Everything that the results of a search depend on, except the machine."""
    material = task.material
    return {
        "format": FORMAT,
        "contract": material.contract,
        "made_of": whole(origins(task)),
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
    """A search: the values of its space, and its folder."""

    bench: Bench
    seed: int
    space: Mapping[str, Sequence[Any]]
    folder: Path

    def trials(self, done: list[Trial], count: int, progress: Progress) -> Iterator[Trial]:
        """New trials until there are `count`; each is appended to `done`."""
        sizes = {name: len(values) for name, values in self.space.items()}
        while len(done) < count:
            place = propose([self.known(trial) for trial in done], sizes, self.seed)
            if place is None:
                progress(f"all {len(done)} students that there are have been measured", 1.0)
                return
            shape = values_at(place, self.space)
            precision, share = shape.pop(PRECISION), 0.8 / count
            report = _within(progress, f"student {len(done) + 1} of {count}", 0.2 + share * len(done), share)
            trial = self.bench.measure(len(done), shape, precision, report)
            yield trial
            done.append(trial)
            report(f"{trial.name}: {self.summary(trial)}", 1.0)

    def known(self, trial: Trial) -> Known:
        values = {**trial.shape, PRECISION: trial.precision}
        # In JSON a tuple is a list.
        place = tuple(
            [json.dumps(value) for value in choices].index(json.dumps(values[name]))
            for name, choices in self.space.items()
        )
        return Known(place, self.aims(trial), trial.over)

    def aims(self, trial: Trial) -> tuple[float, float, float] | None:
        """Quality, median latency and bytes; less is better in each."""
        if trial.score is None or trial.p50_us is None or trial.bytes is None:
            return None
        return (-trial.score if self.bench.task.more else trial.score), trial.p50_us, float(trial.bytes)

    def summary(self, trial: Trial) -> str:
        if trial.status != "trained":
            return f"{trial.status}, {trial.why}"
        return f"{self.bench.task.metric} {trial.score:.4f}, p50 {trial.p50_us:,.0f} µs, {trial.bytes:,} bytes"

    def report(self, trials: Sequence[Trial]) -> dict[str, Any]:
        task, budget = self.bench.task, self.bench.budget
        best = recommended(trials, more=task.more)
        fit = [trial for trial in trials if trial.status == "trained"]
        points = np.array([self.aims(trial) for trial in fit], float).reshape(-1, 3)
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

    def lines(self, best: Trial) -> dict[str, str]:
        """What to write into which file for a student."""
        # As declared: a trial from the journal has lists for tuples.
        values = values_at(self.known(best).place, self.space)
        lines = {"definitions.py": self.bench.task.with_shape({name: values[name] for name in best.shape}).line()}
        if self.bench.profile.precision == FASTEST:
            lines["isthmus.toml"] = f'[profiles.serving]\nprecision = "{best.precision}"'
        return lines


def _previous_report(file: Path, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """The report on disk, if it is of these trials: then they have been measured side by side."""

    def comparable(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{**record, "p50_us": None} for record in records]

    with suppress(OSError, msgspec.DecodeError, LookupError, TypeError):
        data = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        journal = msgspec.json.decode(msgspec.json.encode(trials))
        return data if comparable(data["tried"]) == comparable(journal) else None
    return None


def _within(progress: Progress, name: str, begin: float, share: float) -> Progress:
    return lambda text, done: progress(f"{name}, {text}", begin + share * done)
