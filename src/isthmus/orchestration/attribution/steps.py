"""The step that attributes a package's error to stages and checks the bounds on their effects."""

from isthmus.orchestration.steps.step import Results, Step, Work, plots


def _attribute(work: Work) -> Results:
    from isthmus.orchestration.attribution import page
    from isthmus.orchestration.attribution.attribute import attribute
    from isthmus.orchestration.attribution.report import page_file

    report = attribute(work.project, work.name, progress=work.progress)
    metadata = work.metadata(report.as_dict())
    metadata["attribution"] = plots(page.images(report))
    metadata["page"] = {"raw_value": str(page_file(report.folder)), "type": "path"}
    yield "\n".join(f"{bound}, expected {bound.expected}" for bound in report.bounds if not bound.holds), metadata


STEPS = (
    Step(
        "attribute", "serve", _attribute, checked=("package",), blocking=False,
        checks={
            "stays_close_to_its_ideal": "Every stage between the ideal answer and the package is within its bound."
        },
        select=lambda node: node.model is not None and node.model.bounded,
    ),
)  # fmt: skip
