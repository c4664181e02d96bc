"""A comic effect for a phone's camera: a generator draws frames, and a small network learns from it.

A table lists the frames of each photograph and their drawings (`photographs.py`). Teacher and student have the same
input, a frame; the student has the drawings of the rocket only.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Distillation,
    Entity,
    Expect,
    FeatureService,
    Field,
    Gate,
    Image,
    Int64,
    Picture,
    Search,
    Settings,
    Source,
    String,
    TeacherFunction,
    UNet,
    spine,
    transform,
)

FOR_TEACHER = ("astronaut", "chelsea", "flower", "motorcycle_left")
"""Photographs of the training part whose drawings only the teacher has."""
SPLIT = (0.7, 0.04, 0.26)
SIDE = 256  # of a frame, in pixels

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
    schema=[Field("file", String, "device", description="Path of the frame's PNG file")],
    ttl=None,
    expectations=[Expect.present("file")],
)
def frames(cuts: DataFrame) -> DataFrame:
    """The file of each frame."""
    return cuts.select("photograph", "x", "y", always().alias("event_timestamp"), F.col("frames").alias("file"))


@spine(
    entities=[frame],
    sources=[cuts],
    label=Field("drawing", String, description="Path of the frame's drawing; null for photographs of the teacher"),
)
def shots(cuts: DataFrame) -> DataFrame:
    """One example per frame."""
    drawing = F.when(~F.col("photograph").isin(*FOR_TEACHER), F.col("drawings"))
    return cuts.select(
        "photograph", "x", "y", always().alias("event_timestamp"), always().alias("known_at"), drawing.alias("drawing")
    )


camera = FeatureService("effects_camera", features=[frames], description="What teacher and student see")

effects = Distillation(
    "effects",
    spine=shots,
    teacher=camera,
    student=camera,
    task=Image(
        teacher=TeacherFunction("generator:teacher", files=["data/generator.safetensors"]),
        predicts=Picture(features="generator:features", adversarial=0.002),
        student=UNet(width=16, depth=4, expand=3),
        side=SIDE,
        augment=1,
        soft_weight=0.9,
    ),
    settings=Settings(steps=300, batch=4, learning_rate=2e-3, evaluate_every=60),
    # All frames of a photograph are in one part.
    split=SPLIT,
    split_by="photograph",
    # Shorter than a full training: enough to rank students.
    search=Search(
        shape={"width": (8, 12, 16, 24), "expand": (2, 3, 4), "depth": (1, 2, 4)},
        trials=8,
        settings=Settings(steps=100, batch=4, learning_rate=2e-3, evaluate_every=50),
    ),
    gates=[
        Gate("taught", at_least=0),
        Gate("gain_on_labels", at_least=0),
        Gate("student.ssim", at_least=0.95),
        Gate("student.psnr", at_least=29),
        Gate("student.p50_us", at_most=33_000),
        Gate("student.parameters", at_most=160_000),
    ],
)
