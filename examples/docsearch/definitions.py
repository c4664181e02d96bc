"""Search in the documentation of Python's scientific packages with a model for devices.

The corpus consists of docstrings (`corpus.py`): the first paragraph is a question, and the remaining text is the
passage that answers it. The teacher is the sentence transformer all-MiniLM-L6-v2 with 22.7 million weights; a student
of a fifth of its size learns its vectors.
"""

import hashlib
from pathlib import Path

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Distillation,
    Entity,
    Expect,
    FeatureService,
    Field,
    Gate,
    Int64,
    RequestSource,
    Settings,
    Source,
    String,
    spine,
    transform,
)

docstrings = Source("docstrings", path="data/docstrings.parquet")
passage = Entity("passage", join_keys={"name": String}, description="A documented object, qualified name")


def always() -> Column:
    """Docstrings have no times, so their rows are valid from the beginning."""
    return F.timestamp_seconds(F.lit(0))


@transform(
    entities=[passage],
    sources=[docstrings],
    schema=[Field("package", String, "device"), Field("text", String, "device")],
    ttl=None,
    expectations=[Expect.present("text"), Expect.present("package")],
)
def passages(docstrings: DataFrame) -> DataFrame:
    """Docstrings after their first paragraph."""
    return docstrings.select("name", always().alias("event_timestamp"), "package", "text")


query = RequestSource("query", schema=[Field("question", String)], description="The search query")


@spine(
    entities=[passage],
    sources=[docstrings],
    request=query,
    label=Field("words", Int64, description="Words in the question; only for the report"),
)
def questions(docstrings: DataFrame) -> DataFrame:
    """The first paragraph of every docstring, as a question."""
    return docstrings.select(
        "name",
        always().alias("event_timestamp"),
        always().alias("known_at"),
        "question",
        F.size(F.split("question", " ")).cast("bigint").alias("words"),
    )


server = FeatureService("docsearch_server", features=[query, passages], description="Inputs of the teacher")
device = FeatureService("docsearch_device", features=[query, passages], description="Inputs of the student")

START = Path(__file__).parent / "data" / "start.safetensors"
START_DIGEST = hashlib.sha256(START.read_bytes()).hexdigest()[:12] if START.exists() else None
"""Digest of the weights that `pretrain.py` wrote, if any; `isthmus distill` then takes fewer and smaller steps."""

docsearch = Distillation(
    "docsearch",
    spine=questions,
    teacher=server,
    student=device,
    task="search:DocSearch",
    shape={"start": START_DIGEST} if START_DIGEST else {},
    settings=Settings(
        steps=(100 if START_DIGEST else 300),
        batch=64,
        learning_rate=2e-4 if START_DIGEST else 3e-3,
        weight_decay=1e-2,
        clip=1.0,
        evaluate_every=50 if START_DIGEST else 150,
    ),
    # Inherited methods have the same question: splitting by question keeps it in one part. 5,000 passages are searched.
    split=(0.6, 0.04, 0.36),
    split_by="question",
    gates=[Gate("taught", at_least=0), Gate("student.recall_at_10", at_least=0.5)],
)
