"""Select recorded predictions to attribute: a package's predictions in a range of days, or one prediction."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.distill.declaration import Distillation
from isthmus.features.days import DAY, Days
from isthmus.features.errors import IsthmusError, RequestError
from isthmus.features.values.arrow import ARROW
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import absence
from isthmus.orchestration.recording.provenance import Origins
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.package.manifest import Package

PREDICT = "predict"


class PackagePredictions(NamedTuple):
    """Recorded predictions of a package in one precision, and the number of skipped rows by reason."""

    package: Package
    precision: str
    part: pa.Table
    left_out: dict[str, int]


def predictions(project: Project, declared: Distillation, days: Days | None = None) -> PackagePredictions:
    """Return a model's predictions in a range, from the package and precision that answered last.

    Raises:
        RequestError: the table has no such prediction.
    """
    condition = ds.field("route") == PREDICT
    if days is not None:
        first, end = (pa.scalar(day * DAY, pa.int64()).cast(ARROW["UnixTimestamp"]) for day in (days.first, days.end))
        condition &= (ds.field("at") >= first) & (ds.field("at") < end)
    answers = RecordedAnswers.of(project).read(condition)
    origins, packages, left_out = Origins(project), dict[str, Package](), dict[str, int]()
    for digest in pc.unique(answers["package"]).to_pylist():
        try:
            package = origins.package(digest)
        except IsthmusError as error:
            left_out[str(error)] = _rows(answers.filter(pc.equal(answers["package"], digest)))
            continue
        if package.manifest.name == declared.name:
            packages[digest] = package
    own = answers.filter(pc.is_in(answers["package"], pa.array(packages, pa.string())))
    if not len(own):
        why = "; ".join(f"{count:,} other rows: {reason}" for reason, count in left_out.items())
        raise RequestError(
            f"recorded answers of {declared.name}",
            f"the table has no prediction{'' if days is None else f' from {days}'}{f' ({why})' if why else ''}",
            expected="predictions of a server that has `[server.record]`", remedy="run `isthmus answers collect`",
        )  # fmt: skip
    last = own.slice(int(np.argmax(own["at"].cast(pa.int64()).to_numpy())), 1).to_pylist()[0]
    part, precision = (
        own.filter(pc.equal(own["package"], last["package"])),
        _precision(last["variant"]),
    )
    if skipped := _rows(own) - _rows(part):
        left_out["another package answered"] = skipped
    same = pc.starts_with(part["variant"], f"{precision}/")
    if skipped := _rows(part.filter(pc.invert(same))):
        left_out["another precision answered"] = skipped
    return PackagePredictions(packages[last["package"]], precision, part.filter(same), left_out)


def prediction(project: Project, identity: str) -> PackagePredictions:
    """Return the prediction with an id.

    Raises:
        RequestError: the table lacks the answer, or it is not a prediction.
        DataError: its package is gone.
    """
    part = RecordedAnswers.of(project).read(ds.field("id") == identity)
    if not len(part):
        raise absence(project, identity)
    first = part.slice(0, 1).to_pylist()[0]
    if first["route"] != PREDICT:
        kind = {"lookup": "is a lookup", "generate": "is a text"}.get(first["route"], "has tensors")
        raise RequestError(f"answer {identity}", f"{kind} and has no score", expected="the id of a prediction",
                           remedy=f"run `isthmus answers replay {identity}`")  # fmt: skip
    return PackagePredictions(Origins(project).package(first["package"]), _precision(first["variant"]), part, {})


def _precision(variant: str) -> str:
    return variant.partition("/")[0]


def _rows(answers: pa.Table) -> int:
    return int(pc.sum(answers["rows"]).as_py() or 0)
