"""Steps of a project, shared by Dagster, the demo, and the processes that run steps.

Each step calls the same function as its CLI verb and reports plain data. This module does not import Dagster. Heavy
libraries are imported inside functions, because building Dagster's graph imports this module.
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
    Metadata,
    NodeCheck,
    NodeMaterialization,
    StepRequest,
    plots,
    report_metadata,
    table,
)

if TYPE_CHECKING:
    from isthmus.features.offline.history import ViewHistory
    from isthmus.features.offline.store import TableWrite
    from isthmus.orchestration.graph.translator import Kind
    from isthmus.orchestration.project import Project

_HIDDEN = {REPORT, "format", "name", "more"}  # report entries that are not useful as asset metadata
_DIFFERS = ("", "differing", "compared", "worst", "tolerance", "first key", "event time", "offline", "online")


def run_step(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization | NodeCheck]:
    """Run the requested part of a step and yield its events.

    Raises:
        IsthmusError: the step failed.
    """
    for event in STEPS[request.step].run(project, request, progress):
        # The report goes last, because it is long and hides everything below it.
        report = {name: value for name, value in event.metadata.items() if name == REPORT}
        yield replace(event, metadata={**{n: v for n, v in event.metadata.items() if n not in _HIDDEN}, **report})


def _apply(project: "Project", _request: StepRequest, _progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.orchestration.apply.apply import apply

    began = time.perf_counter()
    applied = apply(project)
    yield NodeMaterialization("contract", applied.contract, report_metadata(asdict(applied), began))


def _ensure_applied(project: "Project", progress: Progress) -> None:
    """Apply the definitions if they changed, so that the step uses the ones that Dagster loaded."""
    from isthmus.orchestration.apply.apply import apply

    try:
        project.applied()
    except ContractMismatch as error:
        progress(f"applying the definitions: {error.found}", 0.0)
        apply(project)


def _build(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.features.days import Days
    from isthmus.orchestration.tables import build

    _ensure_applied(project, progress)
    began, views = time.perf_counter(), _names(request.nodes)
    if request.days is None or request.everything:
        built = build.build(project, views, progress=progress)
    else:
        built = build.build_range(project, views, within=Days.parse(*request.days), progress=progress)
    yield from _tables(project, request, built, began)


def _complete(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.orchestration.tables import build

    _ensure_applied(project, progress)
    began, views = time.perf_counter(), _names(request.nodes)
    late = build.outdated_views(project, views)
    built = build.build(project, late, progress=progress) if late else {}
    yield from _tables(project, request, built, began)


def _tables(
    project: "Project", request: StepRequest, built: "Mapping[str, TableWrite]", began: float
) -> Iterator[NodeMaterialization]:
    for node in request.nodes:
        history = _history(project, node)
        metadata = {"dagster/row_count": history.rows()}
        if (written := built.get(_name(node))) is not None:
            metadata |= report_metadata(asdict(written), began, ["added"])
        yield NodeMaterialization(node, history.fingerprint, metadata)


def _history(project: "Project", node: str) -> "ViewHistory":
    return project.offline_store().history(project.definitions.contract.views[_name(node)])


def _check_tables(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeCheck]:
    from isthmus.orchestration.quality import measure, page

    contract = project.applied()
    for n, (node, check) in enumerate(request.checks):
        name = _name(node)
        progress(f"checking {name}", n / len(request.checks))
        if check == "holds_its_contract":
            history = _history(project, node)
            rows = history.rows()
            metadata = {"rows": rows, "contract": contract.views[name].hash[:12], "version": history.version}
            yield NodeCheck(node, check, rows > 0, "" if rows else "the table is empty", metadata)
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
        yield NodeCheck(node, check, not broken, "\n".join(broken), metadata)


def _check_drift(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeCheck]:
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
        yield NodeCheck(node, check, not drifted, "\n".join(drifted), metadata, blocking=False)


def _materialize(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.orchestration.tables.materialize import materialize

    began = time.perf_counter()
    reports = materialize(project, _names(request.nodes), progress=progress)
    for node in request.nodes:
        report = reports[_name(node)]
        # Every key has a row online, including the keys that did not change.
        metadata = {"dagster/row_count": report.compared, **report_metadata(report.as_dict(), began, ["written"])}
        yield NodeMaterialization(node, _history(project, node).fingerprint, metadata)


def _snapshot(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.orchestration.snapshots.create import snapshot

    for node in request.nodes:
        began = time.perf_counter()
        written = snapshot(project, _name(node), progress=progress)
        metadata = {
            "dagster/row_count": sum(written.rows.values()),
            **report_metadata(written.as_dict(), began, ["bytes"]),
        }
        yield NodeMaterialization(node, written.snapshot, metadata)


def _recorded(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.orchestration.recording.collect import collect, damaged_folder
    from isthmus.orchestration.recording.table import RecordedAnswers

    (node,), began = request.nodes, time.perf_counter()
    collected = collect(project, progress=progress)
    rows, version = RecordedAnswers.of(project).size()
    metadata = {"dagster/row_count": rows, **report_metadata(asdict(collected), began, ["answers", "missing"])}
    metadata["damaged"] = sum(1 for _ in damaged_folder(project).glob("*"))
    if collected.problems:
        metadata["problems"] = "\n".join(collected.problems)
    yield NodeMaterialization(node, f"{version}", metadata)


def _training_set(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.orchestration.training.set import training_set

    _ensure_applied(project, progress)
    (node,), began = request.nodes, time.perf_counter()
    examples = training_set(project, _name(node), progress=progress)
    metadata = {"dagster/row_count": examples.rows_out, **report_metadata(examples.as_dict(), began)}
    yield NodeMaterialization(node, examples.id, metadata)


def _check_examples(project: "Project", request: StepRequest, _progress: Progress) -> Iterator[NodeCheck]:
    from isthmus.orchestration.artifacts import Artifacts

    for node, check in request.checks:
        examples = Artifacts(project, project.distillation(_name(node))).current_training_set()
        rows = len(examples.table())
        passed = examples.rows_in == examples.rows_out == rows
        message = "" if passed else f"the join got {examples.rows_in} rows and returned {rows}"
        yield NodeCheck(node, check, passed, message, {"rows_in": examples.rows_in, "rows_out": rows})


def _distill(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.distill.gates import gate_figures
    from isthmus.distill.reports.figures import images
    from isthmus.orchestration.artifacts import Artifacts
    from isthmus.orchestration.models import cards, students

    began, name = time.perf_counter(), _name(request.nodes[0])
    run = report_metadata(students.distill(project, name, progress=progress).as_dict(), began)
    declared = project.definitions.distillations[name]
    artifacts = Artifacts(project, declared)
    report, folder = artifacts.last_report(), artifacts.last_model()
    made_of, student = report["made_of"], report["id"]
    if "training" in made_of:  # leave out the evaluation
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
        yield NodeMaterialization(node, versions[kind], metadata[kind])


def _check_student(project: "Project", request: StepRequest, _progress: Progress) -> Iterator[NodeCheck]:
    from isthmus.orchestration.models.students import require_quality

    for node, check in request.checks:
        declared = project.definitions.distillations[_name(node)]
        try:
            figures = require_quality(project, declared)
        except GateFailed as error:
            yield NodeCheck(node, check, passed=False, message=str(error))
            continue
        yield NodeCheck(node, check, True, "", {name: value for name, value in figures.items() if value is not None})


def _export(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.orchestration.models.students import export

    (node,), began = request.nodes, time.perf_counter()
    report = export(project, _name(node), progress=progress)
    figures = {"p50_us": report.served.p50_us, "p99_us": report.served.p99_us}
    figures |= {f"bytes {precision}": size for precision, size in report.bytes.items()}
    worst = {f"worst {file}": f"{value:.3g}" for file, value in report.worst.items()}
    metadata = {**figures, **worst, **report_metadata(report.as_dict(), began)}
    yield NodeMaterialization(node, report.digest, metadata)


def _verify(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeCheck]:
    from isthmus.features.document.blocks import plain
    from isthmus.orchestration import status
    from isthmus.orchestration.artifacts import page_file
    from isthmus.orchestration.verification import page
    from isthmus.orchestration.verification.verify import verify

    for node, check in request.checks:
        began = time.perf_counter()
        verdict = verify(project, _name(node), all_keys=True, progress=progress)
        metadata = report_metadata(verdict.as_dict(), began)
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
            # After a passing verdict, the deployment updates the status.
            status.note(project)
        yield NodeCheck(node, check, verdict.passed, message, metadata)


def _attribute(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeCheck]:
    from isthmus.orchestration.attribution import page
    from isthmus.orchestration.attribution.attribute import attribute
    from isthmus.orchestration.attribution.report import page_file

    for node, check in request.checks:
        began = time.perf_counter()
        report = attribute(project, _name(node), progress=progress)
        metadata = report_metadata(report.as_dict(), began)
        metadata["attribution"] = plots(page.images(report))
        metadata["page"] = {"raw_value": str(page_file(report.folder)), "type": "path"}
        broken = "\n".join(f"{bound}, expected {bound.expected}" for bound in report.bounds if not bound.holds)
        yield NodeCheck(node, check, report.passed, broken, metadata, blocking=False)


def _monitor(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeCheck]:
    from isthmus.orchestration.monitoring import page
    from isthmus.orchestration.monitoring.bounds import problems
    from isthmus.orchestration.monitoring.monitor import monitor, plain

    began = time.perf_counter()
    names = {_name(node) for node, _ in request.checks}
    results = {name: monitor(project, name, progress=progress) for name in names}
    for node, check in request.checks:
        result = results[_name(node)]
        wrong = problems(result)[check]
        metadata: Metadata = {**page.headline(result), **report_metadata(plain(project, result), began)}
        metadata["weeks"] = plots(page.images(result))
        titles, rows = page.worst(result)
        metadata |= {"slices": table(rows, titles)} if rows else {}
        yield NodeCheck(node, check, not wrong, "\n".join(wrong), metadata, blocking=False)


def _deploy(project: "Project", request: StepRequest, _progress: Progress) -> Iterator[NodeMaterialization]:
    from isthmus.orchestration import status
    from isthmus.orchestration.models.release import deploy

    (node,), began = request.nodes, time.perf_counter()
    release = deploy(project, _name(node))
    yield NodeMaterialization(node, release.deployment.digest, report_metadata(release.as_dict(), began, ["bytes"]))
    status.note(project)


@dataclass(frozen=True)
class StepSpec:
    """Function of a step, and its settings in Dagster.

    Attributes:
        pool: concurrency pool; it limits how many steps run at once.
        kinds: kinds of the nodes that the step materializes or checks.
        checks: check descriptions by name; a step without checks materializes its nodes.
        op: name of the op; empty for the name of the step.
        blocking: a failed check stops everything downstream.
        divisible: a subset of the nodes can be selected.
        cron: schedule on which the checks run automatically.
    """

    run: "Callable[[Project, StepRequest, Progress], Iterator[NodeMaterialization | NodeCheck]]"
    pool: Literal["engine", "train", "serve"]
    kinds: "tuple[Kind, ...]"
    checks: Mapping[str, str] = field(default_factory=dict)
    op: str = ""
    blocking: bool = True
    divisible: bool = True
    cron: str | None = None


_TABLE_CHECKS = {
    "holds_its_contract": "The table is readable, matches the current contract, and has rows.",
    "meets_its_expectations": "The rows meet the `expectations` of the view.",
}
_DRIFT_CHECK = {DRIFT: "New rows are distributed like the training data of the models."}
_EXAMPLES_CHECK = {"loses_no_row": "The join returned as many rows as it received."}
_QUALITY_CHECK = {"keeps_its_quality": "Every gate of the distillation passes."}
_BOUNDS_CHECK = {
    "stays_close_to_its_ideal": "Every stage between the ideal answer and the package is within its bound."
}
_PRODUCTION_CHECKS = {
    "keeps_its_quality_in_production": "Recorded answers meet every bound, measured with the labels known now.",
    "is_served_what_it_learned_from": "Inputs of recorded answers are distributed like the training set.",
}
_VERDICT = {"verdict": "Offline, online, request-time and package values agree."}

STEPS: Mapping[str, StepSpec] = {
    "apply": StepSpec(_apply, "engine", ("contract",)),
    "build": StepSpec(_build, "engine", ("build",), op="build_days"),
    "whole": StepSpec(_complete, "engine", ("offline",), op="build"),
    "check-tables": StepSpec(_check_tables, "engine", ("offline",), _TABLE_CHECKS),
    "check-drift": StepSpec(_check_drift, "engine", ("offline",), _DRIFT_CHECK, blocking=False),
    "materialize": StepSpec(_materialize, "serve", ("online",)),
    "snapshot": StepSpec(_snapshot, "serve", ("snapshot",)),
    "recorded": StepSpec(_recorded, "serve", ("recorded",)),
    "training-set": StepSpec(_training_set, "engine", ("training_set",)),
    "check-examples": StepSpec(_check_examples, "engine", ("training_set",), _EXAMPLES_CHECK),
    "distill": StepSpec(_distill, "train", ("teacher", "teacher_outputs", "student", "control"), divisible=False),
    "check-student": StepSpec(_check_student, "train", ("student",), _QUALITY_CHECK),
    "export": StepSpec(_export, "train", ("package",)),
    "verify": StepSpec(_verify, "serve", ("package",), _VERDICT),
    "attribute": StepSpec(_attribute, "serve", ("package",), _BOUNDS_CHECK, blocking=False),
    "deploy": StepSpec(_deploy, "serve", ("deployment",)),
    "monitor": StepSpec(_monitor, "engine", ("deployment",), _PRODUCTION_CHECKS, blocking=False, cron="0 * * * *"),
}


_COSTS = ("parameters", "bytes", "p50_us", "p99_us")


def _models(report: Mapping[str, Any]) -> Metadata:
    from isthmus.distill.gates import gate_figures
    from isthmus.distill.reports.comparison import explained

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
