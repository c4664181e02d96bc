"""A small training set with every awkward column, and the declaration that learns from it."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation, Plan, Tabular
from isthmus.distill.distillation import DistillationReport, distill
from isthmus.distill.export.parity import Parity
from isthmus.distill.settings import Settings
from isthmus.distill.tabular.preparation import fit_preparation
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Learn, Material
from isthmus.distill.types import Answers
from isthmus.features.definition.spec import FeatureService, Field, Spine
from isthmus.features.profiles import TrainingProfile
from isthmus.features.types import Bool, Float32, Float64, Int64, String, UnixTimestamp
from isthmus.orchestration.runtimes.products import RUNTIMES
from isthmus.package.inputs import ModelInput
from isthmus.package.manifest import Package
from isthmus.package.replay import deviation
from isthmus.package.verdict import FeatureVerdict
from isthmus.transforms import engine
from isthmus.transforms.preparation.fit import Preparation

HOUR = 3_600_000_000
CONTRACT = "c" * 64
STUDENT = (
    ModelInput("carrier", String),
    ModelInput("distance", Float32),
    ModelInput("hour", Int64),
    ModelInput("weekend", Bool),
    ModelInput("scheduled", UnixTimestamp),
    ModelInput("empty", Float64),
    ModelInput("constant", Float64),
    ModelInput("silent", String),
)
TEACHER = (*STUDENT, ModelInput("secret", Float64))
PROFILE = TrainingProfile(epochs=4, batch=64, threads=1)


def training_set(rows: int = 2000, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng(seed)
    event = np.sort(draw.integers(0, rows, rows)) * HOUR
    distance, hour = draw.normal(800, 300, rows), draw.integers(0, 24, rows)
    carrier = draw.choice(["AA", "UA", "émile", ""], rows)
    secret = draw.normal(size=rows)
    logit = (distance - 800) / 300 + (hour > 12) + (carrier == "AA") + secret - 1
    label = (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    moments = pa.timestamp("us", tz="UTC")
    return pa.table(
        {
            "event_timestamp": pa.array(event, moments),
            "known_at": pa.array(event + HOUR, moments),
            "late": label,
            "carrier": pa.array(carrier.tolist(), pa.string(), mask=draw.random(rows) < 0.1),
            "distance": pa.array(distance, pa.float32(), mask=draw.random(rows) < 0.2),
            "hour": hour,
            "weekend": draw.random(rows) < 0.3,
            "scheduled": pa.array(event, moments),
            "empty": pa.nulls(rows, pa.float64()),
            "constant": np.full(rows, 7.0),
            "silent": pa.nulls(rows, pa.string()),
            "secret": secret,
        }
    )


def declaration(**changes: Any) -> Distillation:
    """With values for the task, for the settings or for the distillation itself, by the names of their attributes."""
    given = {"teacher_rounds": 10, "hidden": (16, 8), "learning_rate": 1e-2, "weight_decay": 1e-2, "batch": 64,
             "seeds": 2, **changes}  # fmt: skip

    def taken(kind: type) -> dict[str, Any]:
        return {part.name: given.pop(part.name) for part in fields(kind) if part.name in given}

    tabular = Tabular(**taken(Tabular))
    own = taken(Distillation)
    nothing = FeatureService("features", [])
    spine = Spine("flights", [], Field("late", Int64), [])
    return Distillation("late", spine, nothing, nothing, **{"task": tabular, "settings": Settings(**given), **own})


def learn(table: pa.Table) -> Learn:
    """What learns a preparation from a table, by Sail."""

    def learned_by_engine(plan: Plan, before: int) -> Preparation:
        with engine.session("sail") as spark:
            return fit_preparation(spark.createDataFrame(table), plan, before)

    return learned_by_engine


def material(table: pa.Table, profile: TrainingProfile = PROFILE, **changes: Any) -> Material:
    contract, training_set = changes.pop("contract", CONTRACT), changes.pop("training_set", "set-1")
    return Material(
        declaration(**changes),
        table,
        TEACHER,
        STUDENT,
        "late",
        training_set,
        contract,
        profile,
        RequestInputs(),
        learn(table),
    )


def run(folder: Path, table: pa.Table, profile: TrainingProfile = PROFILE, **changes: Any) -> DistillationReport:
    notes: list[str] = changes.pop("notes", [])
    told: Callable[[str], None] = changes.pop("told", notes.append)
    again: bool = changes.pop("again", False)
    part: tuple[int, int] | None = changes.pop("part", None)
    return distill(
        material(table, profile, **changes),
        folder=folder / "models",
        cache=folder / "cache",
        runs=folder / "runs",
        again=again,
        progress=lambda text, _done: told(text),
        part=part,
    )


def check_package(
    material: Material, package: Package, model_folder: Path, keys: Sequence[str] = (), rows: int | None = None
) -> dict[str, FeatureVerdict]:
    """Each file of a package beside its student, in the runtime that it is for."""
    parity = Parity(material, package, model_folder, keys)
    questions, compared = parity.sample(parity.rows if rows is None else rows), {}
    for product in RUNTIMES.values():
        if product.option != "web" and any(variant.format in product.formats for variant in package.manifest.variants):
            runtime = product()
            for variant in runtime.files(package.manifest):
                compared[variant.file] = parity.check(variant, partial(runtime.ask, package, variant), questions)
    return compared


def difference(expected: Answers, outputs: Answers) -> float:
    """The largest absolute difference of any output; infinite where a number is missing."""
    return max(deviation(name, expected[name], found, 1.0, widths=True).by for name, found in outputs.items())
