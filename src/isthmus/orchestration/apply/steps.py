"""The pipeline step `apply`, which applies the definitions."""

from dataclasses import asdict

from isthmus.orchestration.steps.outline import Outline
from isthmus.orchestration.steps.step import Asset, Results, Step, Work


def _apply(work: Work) -> Results:
    from isthmus.orchestration.apply.apply import apply

    applied = apply(work.project)
    yield applied.contract, work.metadata(asdict(applied))


CONTRACT = Asset(
    "contract", Outline, lambda _project: "The compiled definitions that every reader checks its data against.",
    library="feast", version=lambda project: project.contract, follows=False,
)  # fmt: skip
STEPS = (Step("apply", "engine", _apply, (CONTRACT,)),)
