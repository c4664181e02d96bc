"""A comic effect for a phone's camera: a generator paints frames, and a small network learns from it.

A table lists the frames of each photograph (`photographs.py`) with a digest of their pixels; the pixels are read from
the packages. Teacher and student have the same input, a frame.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Distillation,
    Entity,
    Expect,
    FeatureService,
    Field,
    Float32,
    Gate,
    Int64,
    Search,
    Settings,
    Source,
    String,
    spine,
    transform,
)

cuts = Source("cuts", path="data/frames.parquet")
frame = Entity(
    "frame",
    join_keys={"photograph": String, "x": Int64, "y": Int64},
    description="A square of a photograph, by its top left corner",
)


def always() -> Column:
    """Photographs have no times, so their rows are valid from the beginning."""
    return F.timestamp_seconds(F.lit(0))


@transform(
    entities=[frame],
    sources=[cuts],
    schema=[Field("pixels", String, "device", description="SHA-256 of the frame's pixels")],
    ttl=None,
    expectations=[Expect.present("pixels")],
)
def frames(cuts: DataFrame) -> DataFrame:
    """The digest of each frame's pixels."""
    return cuts.select("photograph", "x", "y", always().alias("event_timestamp"), "pixels")


@spine(
    entities=[frame],
    sources=[cuts],
    label=Field("contrast", Float32, description="Standard deviation of the pixels; only for the report"),
)
def shots(cuts: DataFrame) -> DataFrame:
    """One example per frame."""
    return cuts.select(
        "photograph", "x", "y", always().alias("event_timestamp"), always().alias("known_at"),
        F.col("contrast").cast("float").alias("contrast"),
    )  # fmt: skip


camera = FeatureService("effects_camera", features=[frames], description="What teacher and student see")

effects = Distillation(
    "effects",
    spine=shots,
    teacher=camera,
    student=camera,
    task="effects:Effects",
    settings=Settings(steps=300, batch=4, learning_rate=2e-3, evaluate_every=60),
    # All frames of a photograph are in one part.
    split=(0.7, 0.04, 0.26),
    split_by="photograph",
    # Shorter than a full training: enough to rank students.
    search=Search(
        shape={"width": (8, 12, 16, 24), "wider": (2, 3, 4), "blocks": (1, 2, 4)},
        trials=8,
        settings=Settings(steps=100, batch=4, learning_rate=2e-3, evaluate_every=50),
    ),
    seeds=3,
    gates=[
        Gate("taught", at_least=0),
        Gate("worth", at_least=0),
        Gate("student.ssim", at_least=0.95),
        Gate("student.psnr", at_least=29),
        Gate("student.flicker", at_most=2),
        Gate("student.p50_us", at_most=33_000),
        Gate("fewer_multiply_adds", at_least=10),
    ],
)
