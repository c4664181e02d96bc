"""What each step does, told as plain data: the same in a process of its own as in this one.

A step is a function of the project; here are their names, the nodes and checks that they stand for, and what is
reported of each. Nothing here knows Dagster.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from isthmus.features.contract.contract import sha256
from isthmus.features.errors import GateFailed
from isthmus.features.offline.store import OfflineStore, Written
from isthmus.features.progress import Progress
from isthmus.orchestration.graph.events import Asked, Checked, Made, Metadata
from isthmus.orchestration.project import Project


def work(project: Project, asked: Asked, progress: Progress) -> Iterator[Made | Checked]:
    """Does a step.

    Args:
        project: whose.
        asked: which, and of it what.
        progress: told what is being done and the share of the step that is done.

    Raises:
        IsthmusError: as the step says.
    """
    for event in _STEPS[asked.step](project, asked, progress):
        # As long as it is, what stands below it is not seen.
        report = {name: value for name, value in event.metadata.items() if name == REPORT}
        yield replace(event, metadata={**{n: v for n, v in event.metadata.items() if n not in _UNTOLD}, **report})


def _apply(project: Project, _asked: Asked, _progress: Progress) -> Iterator[Made]:
    from isthmus.orchestration.apply.apply import apply

    began = time.perf_counter()
    applied = apply(project)
    yield Made("contract", applied.contract, reported(applied.as_dict(), began))


def _ensure_applied(project: Project, progress: Progress) -> None:
    """Whoever loads new definitions into Dagster wants them in force: their tables are built under them."""
    from isthmus.features.errors import ContractMismatch
    from isthmus.orchestration.apply.apply import apply

    try:
        project.applied()
    except ContractMismatch as error:
        progress(f"applying the definitions: {error.found}", 0.0)
        apply(project)


def _build(project: Project, asked: Asked, progress: Progress) -> Iterator[Made]:
    from isthmus.features.days import Days
    from isthmus.orchestration.build import build

    _ensure_applied(project, progress)
    began, views = time.perf_counter(), _names(asked.nodes)
    if asked.days is None or asked.everything:
        built = build.build(project, views, progress=progress)
    else:
        built = build.build_range(project, views, within=Days.parse(*asked.days), progress=progress)
    yield from _tables(project, asked, built, began)


def _whole(project: Project, asked: Asked, progress: Progress) -> Iterator[Made]:
    """Makes whole what was built by days: tables that are made of today's sources and definitions stay as they are."""
    from isthmus.orchestration.build import build

    _ensure_applied(project, progress)
    began, views = time.perf_counter(), _names(asked.nodes)
    late = build.outdated(project, views)
    built = build.build(project, late, progress=progress) if late else {}
    yield from _tables(project, asked, built, began)


def _tables(project: Project, asked: Asked, built: Mapping[str, Written], began: float) -> Iterator[Made]:
    store, contract = OfflineStore(project.offline), project.definitions.contract
    for node in asked.nodes:
        history = store.history(contract.views[_name(node)])
        written = built.get(_name(node))
        metadata = {"dagster/row_count": history.rows()}
        if written is not None:
            metadata |= reported(written.as_dict(), began)
        yield Made(node, store.fingerprint(history), metadata)


def _check_tables(project: Project, asked: Asked, progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration import cells
    from isthmus.orchestration.quality import quality

    contract, store = project.applied(), OfflineStore(project.offline)
    for n, (node, check) in enumerate(asked.checks):
        name = _name(node)
        view = contract.views[name]
        progress(f"checking {name}", n / len(asked.checks))
        if check == "holds_its_contract":
            history = store.history(view)
            rows = history.rows()
            metadata = {"rows": rows, "contract": view.hash, "version": history.version}
            yield Checked(node, check, rows > 0, "" if rows else "the table has no row", metadata)
            continue
        measured = quality.quality(project, [name], drift=False).views[name]
        broken = [str(finding) for finding in measured.findings if not finding.passed]
        metadata = {
            "rows": measured.statistics.rows,
            "expectations": table(
                ([one.feature, one.expectation, one.found] for one in measured.findings),
                ["feature", "expectation", "found"],
            ),
            "statistics": table(cells.feature_rows(measured.statistics), cells.FEATURE_COLUMNS),
        }
        yield Checked(node, check, not broken, "\n".join(broken), metadata)


def _check_drift(project: Project, asked: Asked, progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.quality.quality import quality

    for n, (node, check) in enumerate(asked.checks):
        name = _name(node)
        progress(f"comparing {name}", n / len(asked.checks))
        report = quality(project, [name])
        wrong = report.drifted()
        rows = [
            [one.name, feature, "" if found.psi is None else f"{found.psi:.3g}", ", ".join(found.exceeded)]
            for one in report.views[name].drift
            for feature, found in one.features.items()
        ]
        told: Metadata = {"drift": table(rows, ["model", "feature", "psi", "exceeded"])} if rows else {}
        yield Checked(node, check, not wrong, "\n".join(wrong), told, blocking=False)


def _materialize(project: Project, asked: Asked, progress: Progress) -> Iterator[Made]:
    from isthmus.orchestration.build.materialize import materialize

    began = time.perf_counter()
    done = materialize(project, _names(asked.nodes), progress=progress)
    store, contract = OfflineStore(project.offline), project.definitions.contract
    for node in asked.nodes:
        name = _name(node)
        version = store.fingerprint(store.history(contract.views[name]))
        # A row of each key, also where it was there before.
        yield Made(node, version, {"dagster/row_count": done[name].compared, **reported(done[name].as_dict(), began)})


def _training_set(project: Project, asked: Asked, progress: Progress) -> Iterator[Made]:
    from isthmus.orchestration.training.set import training_set

    _ensure_applied(project, progress)
    (node,), began = asked.nodes, time.perf_counter()
    made = training_set(project, _name(node), progress=progress)
    yield Made(node, made.id, {"dagster/row_count": made.rows_out, **reported(made.as_dict(), began)})


def _check_examples(project: Project, asked: Asked, _progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.artifacts import last_training_set

    for node, check in asked.checks:
        examples = last_training_set(project, project.distillation(_name(node)))
        rows = len(examples.table())
        passed = examples.rows_in == examples.rows_out == rows
        found = "" if passed else f"{examples.rows_in} rows went in, {rows} came out"
        yield Checked(node, check, passed, found, {"rows_in": examples.rows_in, "rows_out": rows})


def _distill(project: Project, asked: Asked, progress: Progress) -> Iterator[Made]:
    from isthmus.distill.gates import figures
    from isthmus.distill.reports import images
    from isthmus.orchestration import artifacts
    from isthmus.orchestration.models import cards, models

    began, name = time.perf_counter(), _name(asked.nodes[0])
    whole = reported(models.distill(project, name, progress=progress).as_dict(), began)
    declared = project.definitions.distillations[name]
    report, folder = artifacts.last_report(project, declared), artifacts.last_model(project, declared)
    page = {"raw_value": str(folder / cards.PAGE), "type": "path"}
    measured = {name: value for name, value in figures(report).items() if value is not None}
    made_of = report["made_of"]
    drawn = {subject: plots(found) for subject, found in images(report).items() if found}
    student = {**whole, **measured, "models": _models(report), **drawn, "page": page}
    told = {"teacher": {}, "teacher_outputs": {}, "student": student, "control": {}}
    for role in ("teacher", "control"):
        told[role] = _figures(report["models"].get(role, {}))
    told["teacher_outputs"] = {"dagster/row_count": sum(report["rows"].values()), "seconds": whole["seconds"]}
    versions = {
        "teacher": sha256({"made_of": made_of, "role": "teacher"}),
        "teacher_outputs": sha256({"made_of": made_of, "role": "outputs"}),
        "student": report["id"],
        "control": sha256({"student": report["id"], "role": "control"}),
    }
    for node in asked.nodes:
        kind = node.partition("/")[0]
        yield Made(node, versions[kind], told[kind])


def _check_student(project: Project, asked: Asked, _progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration.models.models import require_quality

    for node, check in asked.checks:
        declared = project.definitions.distillations[_name(node)]
        try:
            found = require_quality(project, declared)
        except GateFailed as error:
            yield Checked(node, check, passed=False, found=str(error))
            continue
        yield Checked(node, check, True, "", {name: value for name, value in found.items() if value is not None})


def _export(project: Project, asked: Asked, progress: Progress) -> Iterator[Made]:
    from isthmus.orchestration.models.models import export

    (node,), began = asked.nodes, time.perf_counter()
    made = export(project, _name(node), progress=progress)
    metadata = reported(made.as_dict(), began)
    metadata |= {f"{what} {file}": value for what in ("bytes", "worst") for file, value in getattr(made, what).items()}
    metadata |= {"p50_us": made.served.p50_us, "p99_us": made.served.p99_us}
    yield Made(node, made.digest, metadata)


def _verify(project: Project, asked: Asked, progress: Progress) -> Iterator[Checked]:
    from isthmus.orchestration import status
    from isthmus.orchestration.artifacts import page_file
    from isthmus.orchestration.verification import page as verdictpage
    from isthmus.orchestration.verification.verify import verify

    for node, check in asked.checks:
        began = time.perf_counter()
        outcome = verify(project, _name(node), every=True, progress=progress)
        metadata = reported(outcome.as_dict(), began)
        metadata["parity"] = plots(verdictpage.images(outcome))
        metadata["page"] = {"raw_value": str(page_file(project, _name(node))), "type": "path"}
        differing = {name: one for name, one in outcome.named().items() if one.differing}
        rows = []
        for name, one in differing.items():
            first = next(iter(one.examples), None)
            sides = (
                ["-"] * 4
                if first is None
                else [first.key, first.event_timestamp or "-", repr(first.offline), repr(first.online)]
            )
            rows.append(
                [name, f"{one.differing:,}", f"{one.compared:,}", f"{one.worst:.6g}", f"{one.tolerance:g}", *sides]
            )
        if rows:
            metadata["differs"] = table(rows, _DIFFERS)
        found = "" if outcome.passed else f"{outcome.differing:,} of {outcome.compared:,} values differ"
        if not outcome.passed:
            # Else the deployment that follows does it.
            status.note(project)
        yield Checked(node, check, outcome.passed, found, metadata)


def _deploy(project: Project, asked: Asked, _progress: Progress) -> Iterator[Made]:
    from isthmus.orchestration import status
    from isthmus.orchestration.models.release import deploy

    (node,), began = asked.nodes, time.perf_counter()
    done = deploy(project, _name(node))
    yield Made(node, done.deployment.digest, reported(done.as_dict(), began))
    status.note(project)


REPORT = "report"
_UNTOLD = {REPORT, "format", "name", "more"}
"""Of the single values, those that say nothing beside an asset."""
_ROOM = 50_000
"""Characters of the images of one event."""
_DIFFERS = ("", "differing", "compared", "worst", "tolerance", "first key", "event time", "offline", "online")
_STEPS: Mapping[str, Callable[[Project, Asked, Progress], Iterator[Made | Checked]]] = {
    "apply": _apply,
    "build": _build,
    "whole": _whole,
    "check-tables": _check_tables,
    "check-drift": _check_drift,
    "materialize": _materialize,
    "training-set": _training_set,
    "check-examples": _check_examples,
    "distill": _distill,
    "check-student": _check_student,
    "export": _export,
    "verify": _verify,
    "deploy": _deploy,
}


def reported(report: Mapping[str, Any], began: float) -> Metadata:
    """A whole report as JSON, and its numbers one by one: Dagster plots those over time."""
    plain = msgspec.to_builtins(report, str_keys=True, enc_hook=str)
    single = {name: value for name, value in plain.items() if isinstance(value, int | float | str)}
    moments = {
        name: {"raw_value": value / 1e6, "type": "timestamp"}
        for name, value in single.items()
        if isinstance(value, int) and (name == "at" or name.endswith("_at"))
    }
    seconds = round(time.perf_counter() - began, 3)
    return {**single, **moments, "seconds": seconds, REPORT: {"raw_value": plain, "type": "json"}}


def table(rows: Iterable[Sequence[str]], columns: Sequence[str]) -> Metadata:
    """Rows as a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return {"raw_value": "\n".join("| " + " | ".join(line) + " |" for line in lines), "type": "md"}


def plots(images: Mapping[str, str]) -> Metadata:
    """Images as Markdown, as far as there is room: Dagster keeps them with the event, and loads them with each list."""
    shown, left = [], _ROOM
    for name, address in images.items():
        left -= len(address)
        title = re.sub(r"([^\w\s.,]|_)", r"\\\1", name)
        shown += [f"**{title}**", f"![{title}]({address})" if left >= 0 else "is on the page"]
    return {"raw_value": "\n\n".join(shown), "type": "md"}


def _models(report: Mapping[str, Any]) -> Metadata:
    """The measures of all models, side by side."""
    measures = list(report["models"]["student"]["quality"])
    costs = ["parameters", "bytes", "p50_us", "p99_us"]
    rows = [
        [name, *(_figure(model["quality"].get(measure)) for measure in measures), *(_figure(model[c]) for c in costs)]
        for name, model in report["models"].items()
    ]
    return table(rows, ["model", *measures, *costs])


def _figures(model: Mapping[str, Any]) -> Metadata:
    found = {
        **model.get("quality", {}),
        **{name: model.get(name) for name in ("parameters", "bytes", "p50_us", "p99_us")},
    }
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _name(node: str) -> str:
    return node.partition("/")[2]


def _names(nodes: Iterable[str]) -> list[str]:
    return [_name(node) for node in nodes]
