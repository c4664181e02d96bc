"""The steps of a project: a table for Dagster, the demo, and the processes that run them.

Each step calls the function that the command line calls, and reports as plain data. Building Dagster's graph reads the
table, so a library that computes is imported where it is used. Nothing here knows Dagster.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from isthmus.features.contract.schema import sha256
from isthmus.features.document.markdown import to_markdown
from isthmus.features.errors import ContractMismatch, GateFailed
from isthmus.features.progress import Progress
from isthmus.orchestration.graph.events import (
    DRIFT,
    REPORT,
    Checked,
    Materialized,
    Metadata,
    Request,
    plots,
    reported,
    table,
)

if TYPE_CHECKING:
    from isthmus.features.offline.history import ViewHistory
    from isthmus.features.offline.store import TableWrite
    from isthmus.orchestration.graph.translator import Kind
    from isthmus.orchestration.project import Project

_HIDDEN = {REPORT, "format", "name", "more"}
"""Entries of a report that mean nothing as figures of an asset."""
_DIFFERS = ("", "differing", "compared", "worst", "tolerance", "first key", "event time", "offline", "online")


def run_step(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized | Checked]:
    """Runs a step. An IsthmusError that it raises is passed on."""
    for event in STEPS[request.step].run(project, request, progress):
        # The report goes last: it is long, and hides what is below it.
        report = {name: value for name, value in event.metadata.items() if name == REPORT}
        yield replace(event, metadata={**{n: v for n, v in event.metadata.items() if n not in _HIDDEN}, **report})


def _apply(project: "Project", _request: Request, _progress: Progress) -> Iterator[Materialized]:
    from isthmus.orchestration.apply.apply import apply

    began = time.perf_counter()
    applied = apply(project)
    yield Materialized("contract", applied.contract, reported(asdict(applied), began))


def _ensure_applied(project: "Project", progress: Progress) -> None:
    """Applies new definitions: whoever loads them into Dagster expects tables that are built under them."""
    from isthmus.orchestration.apply.apply import apply

    try:
        project.applied()
    except ContractMismatch as error:
        progress(f"applying the definitions: {error.found}", 0.0)
        apply(project)


def _build(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized]:
    from isthmus.features.days import Days
    from isthmus.orchestration.tables import build

    _ensure_applied(project, progress)
    began, views = time.perf_counter(), _names(request.nodes)
    if request.days is None or request.everything:
        built = build.build(project, views, progress=progress)
    else:
        built = build.build_range(project, views, within=Days.parse(*request.days), progress=progress)
    yield from _tables(project, request, built, began)


def _complete(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized]:
    """Completes tables that were built by days, except those that are up to date with sources and definitions."""
    from isthmus.orchestration.tables import build

    _ensure_applied(project, progress)
    began, views = time.perf_counter(), _names(request.nodes)
    late = build.outdated_views(project, views)
    built = build.build(project, late, progress=progress) if late else {}
    yield from _tables(project, request, built, began)


def _tables(
    project: "Project", request: Request, built: "Mapping[str, TableWrite]", began: float
) -> Iterator[Materialized]:
    for node in request.nodes:
        history = _history(project, node)
        metadata = {"dagster/row_count": history.rows()}
        if (written := built.get(_name(node))) is not None:
            metadata |= reported(asdict(written), began, ["added"])
        yield Materialized(node, history.fingerprint, metadata)


def _history(project: "Project", node: str) -> "ViewHistory":

    return project.offline_store().history(project.definitions.contract.views[_name(node)])


def _check_tables(project: "Project", request: Request, progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.quality import measure, page

    contract = project.applied()
    for n, (node, check) in enumerate(request.checks):
        name = _name(node)
        progress(f"checking {name}", n / len(request.checks))
        if check == "holds_its_contract":
            history = _history(project, node)
            rows = history.rows()
            metadata = {"rows": rows, "contract": contract.views[name].hash[:12], "version": history.version}
            yield Checked(node, check, rows > 0, "" if rows else "the table has no row", metadata)
            continue
        report = measure.quality(project, [name], drift=False).views[name]
        broken = [str(finding) for finding in report.findings if not finding.passed]
        metadata = {
            "rows": report.statistics.rows,
            "expectations": table(
                ([finding.feature, finding.expectation, finding.found] for finding in report.findings),
                ["feature", "expectation", "found"],
            ),
            "statistics": table(page.feature_rows(report.statistics), page.FEATURE_COLUMNS),
        }
        yield Checked(node, check, not broken, "\n".join(broken), metadata)


def _check_drift(project: "Project", request: Request, progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.quality.measure import quality

    for n, (node, check) in enumerate(request.checks):
        name = _name(node)
        progress(f"comparing {name}", n / len(request.checks))
        report = quality(project, [name])
        drifted = report.drifted()
        rows = [
            [model.name, feature, "" if drift.psi is None else f"{drift.psi:.3g}", ", ".join(drift.exceeded)]
            for model in report.views[name].drift
            if model.judged
            for feature, drift in model.features.items()
        ]
        few = ", ".join(f"{model.rows} new for {model.name}" for model in report.views[name].drift if not model.judged)
        metadata: Metadata = {"too few rows to judge": few} if few else {}
        metadata |= {"drift": table(rows, ["model", "feature", "psi", "exceeded"])} if rows else {}
        yield Checked(node, check, not drifted, "\n".join(drifted), metadata, blocking=False)


def _materialize(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized]:
    from isthmus.orchestration.tables.materialize import materialize

    began = time.perf_counter()
    reports = materialize(project, _names(request.nodes), progress=progress)
    for node in request.nodes:
        report = reports[_name(node)]
        # Every key has a row online, including the keys that did not change.
        metadata = {"dagster/row_count": report.compared, **reported(report.as_dict(), began, ["written"])}
        yield Materialized(node, _history(project, node).fingerprint, metadata)


def _snapshot(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized]:
    from isthmus.orchestration.snapshots.create import snapshot

    for node in request.nodes:
        began = time.perf_counter()
        written = snapshot(project, _name(node), progress=progress)
        metadata = {"dagster/row_count": sum(written.rows.values()), **reported(written.as_dict(), began, ["bytes"])}
        yield Materialized(node, written.snapshot, metadata)


def _recorded(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized]:
    from isthmus.orchestration.recording.collect import collect, damaged_folder
    from isthmus.orchestration.recording.table import RecordedAnswers

    (node,), began = request.nodes, time.perf_counter()
    collected = collect(project, progress=progress)
    rows, version = RecordedAnswers.of(project).size()
    metadata = {"dagster/row_count": rows, **reported(asdict(collected), began, ["answers", "missing"])}
    metadata["damaged"] = sum(1 for _ in damaged_folder(project).glob("*"))
    if collected.problems:
        metadata["problems"] = "\n".join(collected.problems)
    yield Materialized(node, f"{version}", metadata)


def _training_set(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized]:
    from isthmus.orchestration.training.set import training_set

    _ensure_applied(project, progress)
    (node,), began = request.nodes, time.perf_counter()
    examples = training_set(project, _name(node), progress=progress)
    metadata = {"dagster/row_count": examples.rows_out, **reported(examples.as_dict(), began)}
    yield Materialized(node, examples.id, metadata)


def _check_examples(project: "Project", request: Request, _progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.artifacts import Artifacts

    for node, check in request.checks:
        examples = Artifacts(project, project.distillation(_name(node))).current_training_set()
        rows = len(examples.table())
        passed = examples.rows_in == examples.rows_out == rows
        message = "" if passed else f"{examples.rows_in} rows went in, {rows} came out"
        yield Checked(node, check, passed, message, {"rows_in": examples.rows_in, "rows_out": rows})


def _distill(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized]:
    from isthmus.distill.gates import gate_figures
    from isthmus.distill.reports import images
    from isthmus.orchestration.artifacts import Artifacts
    from isthmus.orchestration.models import cards, students

    began, name = time.perf_counter(), _name(request.nodes[0])
    run = reported(students.distill(project, name, progress=progress).as_dict(), began)
    declared = project.definitions.distillations[name]
    artifacts = Artifacts(project, declared)
    report, folder = artifacts.last_report(), artifacts.last_model()
    made_of, student = report["made_of"], report["id"]
    if "training" in made_of:  # not how it is judged
        made_of = {name: made_of[name] for name in ("training_set", "training")}
    metadata: dict[str, Metadata] = {
        "teacher": _figures(report["models"].get("teacher", {})),
        "teacher_outputs": {"dagster/row_count": sum(report["rows"].values()), "seconds": run["seconds"]},
        "student": {
            **{name: value for name, value in gate_figures(report).items() if value is not None and "." not in name},
            **_figures(report["models"]["student"]),
            "models": _models(report),
            "page": {"raw_value": str(folder / cards.PAGE), "type": "path"},
            **{subject: plots(drawn) for subject, drawn in images(report).items() if drawn},
            **run,
        },
        "control": _figures(report["models"].get("control", {})),
    }
    versions = {
        "teacher": sha256({"made_of": made_of, "role": "teacher"}),
        "teacher_outputs": sha256({"made_of": made_of, "role": "outputs"}),
        "student": student,
        "control": sha256({"student": student, "role": "control"}),
    }
    for node in request.nodes:
        kind = node.partition("/")[0]
        yield Materialized(node, versions[kind], metadata[kind])


def _check_student(project: "Project", request: Request, _progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.models.students import require_quality

    for node, check in request.checks:
        declared = project.definitions.distillations[_name(node)]
        try:
            figures = require_quality(project, declared)
        except GateFailed as error:
            yield Checked(node, check, passed=False, message=str(error))
            continue
        yield Checked(node, check, True, "", {name: value for name, value in figures.items() if value is not None})


def _export(project: "Project", request: Request, progress: Progress) -> Iterator[Materialized]:
    from isthmus.orchestration.models.students import export

    (node,), began = request.nodes, time.perf_counter()
    report = export(project, _name(node), progress=progress)
    figures = {"p50_us": report.served.p50_us, "p99_us": report.served.p99_us}
    figures |= {f"bytes {precision}": size for precision, size in report.bytes.items()}
    worst = {f"worst {file}": f"{value:.3g}" for file, value in report.worst.items()}
    metadata = {**figures, **worst, **reported(report.as_dict(), began)}
    yield Materialized(node, report.digest, metadata)


def _verify(project: "Project", request: Request, progress: Progress) -> Iterator[Checked]:
    from isthmus.features.document.blocks import plain
    from isthmus.orchestration import status
    from isthmus.orchestration.artifacts import page_file
    from isthmus.orchestration.verification import page
    from isthmus.orchestration.verification.verify import verify

    for node, check in request.checks:
        began = time.perf_counter()
        verdict = verify(project, _name(node), all_keys=True, progress=progress)
        metadata = reported(verdict.as_dict(), began)
        metadata["parity"] = plots(page.images(verdict))
        metadata["page"] = {"raw_value": str(page_file(project, _name(node))), "type": "path"}
        rows = []
        for name, feature in verdict.named().items():
            if feature.differing:
                sides = ["-"] * 4
                if feature.examples:
                    first = feature.examples[0]
                    sides = [first.key, first.event_timestamp or "-", repr(first.offline), repr(first.online)]
                counts = [f"{feature.differing:,}", f"{feature.compared:,}"]
                rows.append([name, *counts, f"{feature.worst:.6g}", f"{feature.tolerance:g}", *sides])
        if rows:
            metadata["differs"] = table(rows, _DIFFERS)
        if verdict.limits:
            metadata["limits"] = "; ".join(verdict.limits)
        if verdict.runtimes:
            metadata["runtimes"] = table(
                ([plain(cell) for cell in row] for row in page.runtimes(verdict).rows),
                ["runtime", *page.RUNTIME_NUMBERS],
            )
        message = "" if verdict.passed else f"{verdict.differing:,} of {verdict.compared:,} values differ"
        if not verdict.passed:
            # After a verdict that passes, the deployment updates the status.
            status.note(project)
        yield Checked(node, check, verdict.passed, message, metadata)


def _attribute(project: "Project", request: Request, progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.attribution import page
    from isthmus.orchestration.attribution.attribute import attribute
    from isthmus.orchestration.attribution.report import page_file

    for node, check in request.checks:
        began = time.perf_counter()
        found = attribute(project, _name(node), progress=progress)
        metadata = reported(found.as_dict(), began)
        metadata["attribution"] = plots(page.images(found))
        metadata["page"] = {"raw_value": str(page_file(found.folder)), "type": "path"}
        broken = "\n".join(f"{bound}, expected {bound.expected}" for bound in found.bounds if not bound.holds)
        yield Checked(node, check, found.passed, broken, metadata, blocking=False)


def _monitor(project: "Project", request: Request, progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.monitoring import page
    from isthmus.orchestration.monitoring.bounds import problems
    from isthmus.orchestration.monitoring.monitor import monitor, plain

    began = time.perf_counter()
    found = {name: monitor(project, name, progress=progress) for name in {_name(node) for node, _ in request.checks}}
    for node, check in request.checks:
        result = found[_name(node)]
        wrong = problems(result)[check]
        metadata: Metadata = {**page.headline(result), **reported(plain(project, result), began)}
        metadata["weeks"] = plots(page.images(result))
        titles, rows = page.worst(result)
        metadata |= {"slices": table(rows, titles)} if rows else {}
        yield Checked(node, check, not wrong, "\n".join(wrong), metadata, blocking=False)


def _deploy(project: "Project", request: Request, _progress: Progress) -> Iterator[Materialized]:
    from isthmus.orchestration import status
    from isthmus.orchestration.models.release import deploy

    (node,), began = request.nodes, time.perf_counter()
    release = deploy(project, _name(node))
    yield Materialized(node, release.deployment.digest, reported(release.as_dict(), began, ["bytes"]))
    status.note(project)


@dataclass(frozen=True)
class Step:
    """A step: its function, and its place in Dagster.

    `pool` limits how many such steps run at once. `checks` are descriptions by name; a step without checks materializes
    its nodes. `op` is empty for the name of the step. A check that is `blocking` holds up everything downstream when it
    fails. Of a step that is `divisible`, a part of the nodes can be selected. `cron` is when checks run by themselves.
    """

    run: "Callable[[Project, Request, Progress], Iterator[Materialized | Checked]]"
    pool: Literal["engine", "train", "serve"]
    kinds: "tuple[Kind, ...]"
    checks: Mapping[str, str] = field(default_factory=dict)
    op: str = ""
    blocking: bool = True
    divisible: bool = True
    cron: str | None = None


_TABLE_CHECKS = {
    "holds_its_contract": "The table can be read, was built under today's contract, and holds rows.",
    "meets_its_expectations": "The rows still hold what the view promises of them, in its `expectations`.",
}
_DRIFT_CHECK = {DRIFT: "New rows are like those that the models learned from."}
_EXAMPLES_CHECK = {"loses_no_row": "As many rows came out of the join as went in."}
_QUALITY_CHECK = {"keeps_its_quality": "Every gate that the distillation declares holds."}
_BOUNDS_CHECK = {"stays_close_to_its_ideal": "Nothing between the ideal answer and the package's exceeds its bound."}
_PRODUCTION_CHECKS = {
    "keeps_its_quality_in_production": "No bound on recorded answers is broken, by the labels of now.",
    "is_served_what_it_learned_from": "Recorded answers rest on inputs like those of the training set.",
}
_VERDICT = {"verdict": "What is offline, served, computed on request and seen by the package agrees."}

STEPS: Mapping[str, Step] = {
    "apply": Step(_apply, "engine", ("contract",)),
    "build": Step(_build, "engine", ("build",), op="build_days"),
    "whole": Step(_complete, "engine", ("offline",), op="build"),
    "check-tables": Step(_check_tables, "engine", ("offline",), _TABLE_CHECKS),
    "check-drift": Step(_check_drift, "engine", ("offline",), _DRIFT_CHECK, blocking=False),
    "materialize": Step(_materialize, "serve", ("online",)),
    "snapshot": Step(_snapshot, "serve", ("snapshot",)),
    "recorded": Step(_recorded, "serve", ("recorded",)),
    "training-set": Step(_training_set, "engine", ("training_set",)),
    "check-examples": Step(_check_examples, "engine", ("training_set",), _EXAMPLES_CHECK),
    "distill": Step(_distill, "train", ("teacher", "teacher_outputs", "student", "control"), divisible=False),
    "check-student": Step(_check_student, "train", ("student",), _QUALITY_CHECK),
    "export": Step(_export, "train", ("package",)),
    "verify": Step(_verify, "serve", ("package",), _VERDICT),
    "attribute": Step(_attribute, "serve", ("package",), _BOUNDS_CHECK, blocking=False),
    "deploy": Step(_deploy, "serve", ("deployment",)),
    "monitor": Step(_monitor, "engine", ("deployment",), _PRODUCTION_CHECKS, blocking=False, cron="0 * * * *"),
}


_COSTS = ("parameters", "bytes", "p50_us", "p99_us")


def _models(report: Mapping[str, Any]) -> Metadata:
    """The models side by side, and what each figure means."""
    from isthmus.distill.gates import gate_figures
    from isthmus.distill.reports import explained

    measures = list(report["models"]["student"]["quality"])
    rows = [
        [name, *(_figure(model["quality"].get(measure)) for measure in measures), *(_figure(model[c]) for c in _COSTS)]
        for name, model in report["models"].items()
    ]
    shown = table(rows, ["model", *measures, *_COSTS])
    meanings = to_markdown(explained([*measures, *gate_figures(report), "p50", "p99"]))
    return {**shown, "raw_value": f"{shown['raw_value']}\n\n{meanings}"}


def _figures(model: Mapping[str, Any]) -> Metadata:
    values = {**model.get("quality", {}), **{name: model.get(name) for name in _COSTS}}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _name(node: str) -> str:
    return node.partition("/")[2]


def _names(nodes: Iterable[str]) -> list[str]:
    return [_name(node) for node in nodes]
