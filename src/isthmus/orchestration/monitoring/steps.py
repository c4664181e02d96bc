"""Step that checks the production quality of a deployed model."""

from isthmus.orchestration.steps.step import Metadata, Results, Step, Work, markdown, plots


def _monitor(work: Work) -> Results:
    from isthmus.orchestration.monitoring import page
    from isthmus.orchestration.monitoring.bounds import problems
    from isthmus.orchestration.monitoring.monitor import monitor, plain

    result = monitor(work.project, work.name, progress=work.progress)
    for check in work.checks:
        metadata: Metadata = {**page.headline(result), **work.metadata(plain(work.project, result))}
        metadata["weeks"] = plots(page.images(result))
        metadata |= (
            {"slices": markdown(page.slice_table(result))} if result.packages and result.packages[0].slices else {}
        )
        yield "\n".join(problems(result)[check]), metadata


STEPS = (
    Step(
        "monitor", "engine", _monitor, checked=("deployment",), blocking=False, cron="0 * * * *",
        checks={
            "keeps_its_quality_in_production": "Recorded answers meet every bound, measured with the labels known now.",
            "is_served_what_it_learned_from": "Inputs of recorded answers are distributed like the training set.",
        },
        select=lambda node: node.model is not None and node.model.monitored,
    ),
)  # fmt: skip
