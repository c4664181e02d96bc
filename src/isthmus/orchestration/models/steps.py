"""Steps that train, check, export and deploy a model."""

from collections.abc import Mapping
from typing import Any

from isthmus.features.contract.schema import sha256
from isthmus.features.errors import GateFailed
from isthmus.orchestration.steps.outline import ModelOutline
from isthmus.orchestration.steps.step import Asset, Metadata, Results, Step, Work, markdown, plots

_COSTS = ("parameters", "bytes", "p50_us", "p99_us")


def _distill(work: Work) -> Results:
    from isthmus.distill.gates import gate_figures
    from isthmus.distill.reports.page import images
    from isthmus.orchestration.artifacts import Artifacts
    from isthmus.orchestration.models import cards, students

    run = work.metadata(students.distill(work.project, work.name, progress=work.progress).as_dict())
    artifacts = Artifacts.of(work.project, work.name)
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
    for node in work.nodes:
        kind = node.partition("/")[0]
        yield versions[kind], metadata[kind]


def _distill_part(work: Work) -> Results:
    from isthmus.orchestration.models import students

    assert work.request.share is not None  # noqa: S101 - this step has no nodes
    name, *part = work.request.share
    students.distill(work.project, name, part=(part[0], part[1]), progress=work.progress)
    yield from ()


def _models(report: Mapping[str, Any]) -> Metadata:
    from isthmus.distill.gates import gate_figures
    from isthmus.distill.reports.comparison import comparison, explained, measures
    from isthmus.distill.reports.report import read_report

    read = read_report(report)
    return markdown(comparison(read), *explained([*measures(read), *gate_figures(report)]))


def _figures(model: Mapping[str, Any]) -> Metadata:
    values = {**model.get("quality", {}), **{name: model.get(name) for name in _COSTS}}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _check_student(work: Work) -> Results:
    from isthmus.orchestration.models.students import require_quality

    try:
        figures = require_quality(work.project, work.project.definitions.distillations[work.name])
    except GateFailed as error:
        yield str(error), {}
    else:
        yield "", {name: value for name, value in figures.items() if value is not None}


def _export(work: Work) -> Results:
    from isthmus.orchestration.models.students import export

    report = export(work.project, work.name, progress=work.progress)
    figures = {"p50_us": report.served.p50_us, "p99_us": report.served.p99_us}
    figures |= {f"bytes {precision}": size for precision, size in report.bytes.items()}
    worst = {f"worst {file}": f"{value:.3g}" for file, value in report.worst.items()}
    yield report.digest, {**figures, **worst, **work.metadata(report.as_dict())}


def _deploy(work: Work) -> Results:
    from isthmus.orchestration.models.release import deploy

    release = deploy(work.project, work.name)
    yield release.deployment.digest, work.metadata(release.as_dict(), ["bytes"])


# A changed metric makes students stale (they are only evaluated again), but not teachers.
TEACHER = Asset(
    "teacher", ModelOutline, lambda _model: "A large model that may use every feature of the server.",
    library="pytorch", version=lambda model: model.teaching, deps=lambda model: [f"training_set/{model.name}"],
)  # fmt: skip
TEACHER_OUTPUTS = Asset(
    "teacher_outputs", ModelOutline, lambda _model: "The teacher's prediction for each row, computed once and cached.",
    library="pytorch", version=lambda model: model.teaching,
    deps=lambda model: [f"teacher/{model.name}", f"training_set/{model.name}"],
)  # fmt: skip
STUDENT = Asset(
    "student", ModelOutline,
    lambda model: model.description or "A small model trained on labels and the teacher's predictions.",
    library="pytorch", version=lambda model: model.training,
    deps=lambda model: [f"teacher_outputs/{model.name}", f"training_set/{model.name}"],
)  # fmt: skip
CONTROL = Asset(
    "control", ModelOutline, lambda _model: "The same small model, trained on labels only.",
    library="pytorch", version=lambda model: model.training, deps=lambda model: [f"training_set/{model.name}"],
)  # fmt: skip
PACKAGE = Asset(
    "package", ModelOutline, lambda _model: "The model package that ships to devices.",
    library="onnx", version=lambda model: model.export, deps=lambda model: [f"student/{model.name}"],
)  # fmt: skip
DEPLOYMENT = Asset(
    "deployment", ModelOutline, lambda _model: "The package that the API serves.",
    library="onnx", version=lambda model: model.export,
    deps=lambda model: [f"package/{model.name}", *map("online/{}".format, model.served)],
)  # fmt: skip
STEPS = (
    Step(
        "distill", "train", _distill, (TEACHER, TEACHER_OUTPUTS, STUDENT, CONTROL), together=True, divisible=False,
        divides="distill-part",
    ),
    Step("distill-part", "train", _distill_part, together=True),
    Step(
        "check-student", "train", _check_student, checked=("student",),
        checks={"keeps_its_quality": "Every gate of the distillation passes."},
    ),
    Step("export", "train", _export, (PACKAGE,)),
    Step("deploy", "serve", _deploy, (DEPLOYMENT,), changes_status=True),
)  # fmt: skip
