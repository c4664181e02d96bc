"""Search in the documentation of the scientific packages of Python, by a model that a device can have.

The corpus is what their docstrings say (`corpus.py`): the first sentence of each is taken for a question, the rest for
the passage that answers it. A sentence transformer of 22.7 million weights, all-MiniLM-L6-v2, knows which passages lie
near a question; a student of a fifth of its size learns where it puts them.
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
passage = Entity("passage", join_keys={"name": String}, description="What is documented, by its qualified name")


def always() -> Column:
    """Docstrings have no times: what they say holds from the beginning."""
    return F.timestamp_seconds(F.lit(0))


@transform(
    entities=[passage],
    sources=[docstrings],
    schema=[Field("package", String, "device"), Field("text", String, "device")],
    ttl=None,
    expectations=[Expect.present("text"), Expect.present("package")],
)
def passages(docstrings: DataFrame) -> DataFrame:
    """What a docstring says after its first sentence."""
    return docstrings.select("name", always().alias("event_timestamp"), "package", "text")


query = RequestSource("query", schema=[Field("question", String)], description="What is searched for")


@spine(
    entities=[passage],
    sources=[docstrings],
    request=query,
    label=Field("words", Int64, description="How many words the question has; only the report looks at it"),
)
def questions(docstrings: DataFrame) -> DataFrame:
    """The first sentence of every docstring, as a question that the rest of it answers."""
    return docstrings.select(
        "name",
        always().alias("event_timestamp"),
        always().alias("known_at"),
        "question",
        F.size(F.split("question", " ")).cast("bigint").alias("words"),
    )


server = FeatureService("docsearch_server", features=[query, passages], description="What the teacher reads")
device = FeatureService("docsearch_device", features=[query, passages], description="What the student reads")

START = Path(__file__).parent / "data" / "start.safetensors"
STARTED = hashlib.sha256(START.read_bytes()).hexdigest()[:12] if START.exists() else None
"""What `pretrain.py` has taught the student already, if it has: then little is left to learn, in small steps."""

docsearch = Distillation(
    "docsearch",
    spine=questions,
    teacher=server,
    student=device,
    task="search:DocSearch",
    shape={"start": STARTED} if STARTED else {},
    settings=Settings(
        steps=(100 if STARTED else 300),
        batch=64,
        learning_rate=2e-4 if STARTED else 3e-3,
        weight_decay=1e-2,
        clip=1.0,
        evaluate_every=50 if STARTED else 150,
    ),
    # Inherited methods ask the same: a question that was learned from is never tested. 5,000 passages are searched.
    split=(0.6, 0.04, 0.36),
    split_by="question",
    gates=[Gate("taught", at_least=0), Gate("student.recall_at_10", at_least=0.5)],
)
