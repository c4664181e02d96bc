"""Step that collects recorded answers."""

from dataclasses import asdict

from isthmus.orchestration.steps.outline import Outline
from isthmus.orchestration.steps.step import Asset, Results, Step, Work


def _collect(work: Work) -> Results:
    from isthmus.orchestration.recording.collect import collect, damaged_folder
    from isthmus.orchestration.recording.table import RecordedAnswers

    collected = collect(work.project, progress=work.progress)
    rows, version = RecordedAnswers.of(work.project).size()
    metadata = {"dagster/row_count": rows, **work.metadata(asdict(collected), ["answers", "missing"])}
    metadata["damaged"] = sum(1 for _ in damaged_folder(work.project).glob("*"))
    if collected.problems:
        metadata["problems"] = "\n".join(collected.problems)
    yield f"{version}", metadata


# No dependencies: servers record answers on their own.
RECORDED = Asset(
    "recorded", Outline, lambda _project: "The inputs of every recorded answer, enough to replay it exactly.",
    library="deltalake", follows=False,
)  # fmt: skip
STEPS = (Step("recorded", "serve", _collect, (RECORDED,), select=lambda node: node.outline.records),)
