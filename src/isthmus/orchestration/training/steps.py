"""Steps that write and check the training set of a model."""

from isthmus.orchestration.steps.outline import ModelOutline
from isthmus.orchestration.steps.step import Asset, Results, Step, Work


def _training_set(work: Work) -> Results:
    from isthmus.orchestration.training.set import training_set

    examples = training_set(work.project, work.name, progress=work.progress)
    yield examples.id, {"dagster/row_count": examples.rows_out, **work.metadata(examples.as_dict())}


def _check_examples(work: Work) -> Results:
    from isthmus.orchestration.artifacts import Artifacts

    examples = Artifacts.of(work.project, work.name).current_training_set()
    rows = len(examples.table())
    passed = examples.rows_in == examples.rows_out == rows
    message = "" if passed else f"the join got {examples.rows_in} rows and returned {rows}"
    yield message, {"rows_in": examples.rows_in, "rows_out": rows}


TRAINING_SET = Asset(
    "training_set", ModelOutline, lambda _model: "Every example with the features that were known at its time.",
    library="duckdb", version=lambda model: model.examples,
    deps=lambda model: [*map("offline/{}".format, model.views), *map("source/{}".format, model.sources)],
    follows=False,
)  # fmt: skip
STEPS = (
    Step("training-set", "engine", _training_set, (TRAINING_SET,), applies=True),
    Step(
        "check-examples", "engine", _check_examples, checked=("training_set",),
        checks={"loses_no_row": "The join returned as many rows as it received."},
    ),
)  # fmt: skip
