"""Steps that check the offline tables."""

from isthmus.features.document.blocks import TableBlock
from isthmus.orchestration.steps.step import Metadata, Results, Step, Work, markdown

HOLDS = "holds_its_contract"
DRIFT = "resembles_its_training"  # the check that makes a model due for training when it fails


def _check_tables(work: Work) -> Results:
    from isthmus.orchestration.quality import measure, page

    project, name = work.project, work.name
    view = project.applied().views[name]
    work.progress(f"checking {name}", 0.0)
    for check in work.checks:
        if check == HOLDS:
            history = project.offline_store().history(project.definitions.contract.views[name])
            rows = history.rows()
            metadata: Metadata = {"rows": rows, "contract": view.hash[:12], "version": history.version}
            yield "" if rows > 0 else "the table is empty", metadata
            continue
        report = measure.quality(project, [name], drift=False).views[name]
        broken = [str(finding) for finding in report.findings if not finding.passed]
        metadata = {
            "rows": report.statistics.rows,
            "expectations": markdown(page.expectations_table(report.findings)),
            "statistics": markdown(page.features_table(report.statistics)),
        }
        yield "\n".join(broken), metadata


def _check_drift(work: Work) -> Results:
    from isthmus.orchestration.quality.measure import quality

    work.progress(f"comparing {work.name}", 0.0)
    report = quality(work.project, [work.name])
    models = report.views[work.name].drift
    rows = [
        [model.name, feature, "" if drift.psi is None else f"{drift.psi:.3g}", ", ".join(drift.exceeded)]
        for model in models
        if model.judged
        for feature, drift in model.features.items()
    ]
    few = ", ".join(f"{model.rows} new for {model.name}" for model in models if not model.judged)
    metadata: Metadata = {"too few rows to judge": few} if few else {}
    metadata |= {"drift": markdown(TableBlock(["model", "feature", "psi", "exceeded"], rows))} if rows else {}
    yield "\n".join(report.drifted()), metadata


STEPS = (
    Step(
        "check-tables", "engine", _check_tables, checked=("offline",),
        checks={
            HOLDS: "The table is readable, matches the current contract, and has rows.",
            "meets_its_expectations": "The rows meet the `expectations` of the view.",
        },
    ),
    Step(
        "check-drift", "engine", _check_drift, checked=("offline",), blocking=False,
        checks={DRIFT: "New rows are distributed like the training data of the models."},
        select=lambda node: any(node.name in model.views for model in node.outline.models),
    ),
)  # fmt: skip
