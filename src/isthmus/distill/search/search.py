"""The step: students of many shapes, each measured as it would be served, and the best of them.

A graph costs what it costs whatever its weights are. So it is measured first, without training, and a student that does
not keep to the budget is not trained at all.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch

from isthmus.distill.declaration import Search
from isthmus.distill.export.acceptance import allowed
from isthmus.distill.onnx.host import host
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.preflight import rehearse, require_measured
from isthmus.distill.restore import create_task, origins, require_shape
from isthmus.distill.search.bench import Bench
from isthmus.distill.search.pareto import front
from isthmus.distill.search.sampler import Known, proposed
from isthmus.distill.search.trials import Budget, Trials, Tried, nearest, recommended, shaped
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.training.teacheroutputs import complete_outputs, open_outputs
from isthmus.features.contract.contract import sha256
from isthmus.features.errors import ConfigurationError, GateFailed, Problem
from isthmus.features.files import write_atomically
from isthmus.features.profiles import FASTEST, ServingProfile
from isthmus.features.progress import Progress

FORMAT = 1
JOURNAL = "tried.jsonl"
REPORT = "search.json"
HOST = "host.json"
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
            with what is searched, or not in the precision that is served.
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
    task = create_task(material)
    require_shape(task, asked.shape, where)
    space = {**asked.shape, PRECISION: allowed(task, profile)}
    rows = np.arange(material.table.num_rows)
    teacher, settings, told = (
        task.teacher(),
        declared.search_settings(material.profile),
        _within(progress, "teacher", 0.0, 0.2),
    )
    outputs = open_outputs(task, teacher, rows, cache, told)
    rehearse(task, teacher, outputs, settings, lambda text: progress(text, 0.0))
    outputs, facts = complete_outputs(task, teacher, rows, cache, told, outputs)
    require_measured(task, outputs, facts, task.references())
    budget = Budget(
        profile.latency_objective_ms, profile.memory_mb, profile.load_ms, profile.package_kb, asked.most_bytes,
        facts.bytes,
    )  # fmt: skip
    machine, about = host(), sha256(_about(task, asked, outputs, profile))
    identity = sha256({"search": about, "host": machine})[:12]
    own = folder / identity
    _set_apart(folder, own, about, machine, progress)
    bench = Bench(task, outputs, profile, budget, folder / "students", own / "graphs", runs)
    journal = Trials(own / JOURNAL)
    with journal.locked() as tried:
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
        if (before := _told_before(own / REPORT, tried)) is not None:
            return SearchReport(own, before)
        progress("measured side by side", 1.0)
        data = _report(task, bench.side_by_side(tried), identity, space, budget, profile)
        write_atomically(own / REPORT, json.dumps(data, indent=2, allow_nan=False).encode())
    return SearchReport(own, data)


def _told_before(file: Path, tried: Sequence[Tried]) -> dict[str, Any] | None:
    """The report of these students, if there is one: what has been measured side by side is not measured again."""
    known = msgspec.json.decode(msgspec.json.encode(tried))
    with suppress(OSError, msgspec.DecodeError, LookupError, TypeError):
        data = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        told, kept = ([{**one, "p50_us": None} for one in some] for some in (data["tried"], known))
        return data if told == kept else None
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


class _Measured(msgspec.Struct, frozen=True):
    """Beside a journal: which search it is of, and on which machine."""

    search: str
    host: str


def _set_apart(folder: Path, own: Path, about: str, machine: str, progress: Progress) -> None:
    """Says if the same has been searched on another machine: figures of two machines are not compared."""
    others = []
    for file in sorted(folder.glob(f"*/{HOST}")):
        with suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.decode(file.read_bytes(), type=_Measured)
            if found.search == about:
                others.append(found.host)
    if machine in others:
        return
    if others:
        progress(
            f"was searched on {' and on '.join(others)}, whose figures are not those of this host, {machine}: all "
            "students are measured anew here, and those whose weights are kept are not trained again", 0.2
        )  # fmt: skip
    write_atomically(own / HOST, msgspec.json.encode(_Measured(about, machine)))


def _about(task: Task, asked: Search, outputs: TeacherOutputs, profile: ServingProfile) -> dict[str, Any]:
    """Everything that the findings of a search depend on, but the machine."""
    material = task.material
    return {
        "format": FORMAT,
        "contract": material.contract,
        "made_of": origins(task),
        "seed": [material.declaration.seed, asked.seed],
        "shape": {name: list(values) for name, values in asked.shape.items()},
        "most_bytes": asked.most_bytes,
        "settings": material.declaration.search_settings(material.profile).identity(),
        "outputs": outputs.path.name,
        "profiles": [material.profile.identity(), profile.identity()],
        "versions": [torch.__version__, onnxruntime.__version__],
    }


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
        "host": host(),
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
