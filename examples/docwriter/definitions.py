"""A small language model that writes docstrings, taught by a large one.

The texts are docstrings of installed packages (`corpus.py`) and, for replay, general descriptions of software. The
teacher is SmolLM2-135M-Instruct (`writer.py`). The student has 1.3 % of its weights and only the tokens that these
texts use.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Causal,
    Distillation,
    Entity,
    Expect,
    FeatureService,
    Field,
    Gate,
    Int64,
    Settings,
    Source,
    String,
    spine,
    transform,
)

texts = Source("texts", path="data/texts.parquet")
subject = Entity("subject", join_keys={"name": String}, description="A described object, by name")


def always() -> Column:
    """Descriptions have no times, so their rows are valid from the beginning."""
    return F.timestamp_seconds(F.lit(0))


@transform(
    entities=[subject],
    sources=[texts],
    schema=[Field("text", String, "device")],
    ttl=None,
    expectations=[Expect.present("text")],
)
def said(texts: DataFrame) -> DataFrame:
    """The text about a subject."""
    return texts.select("name", always().alias("event_timestamp"), "text")


@spine(
    entities=[subject],
    sources=[texts],
    label=Field("domain", Int64, description="1 for a docstring, 0 for a general text"),
)
def subjects(texts: DataFrame) -> DataFrame:
    """All subjects; the label tells docstrings from general texts."""
    return texts.select("name", always().alias("event_timestamp"), always().alias("known_at"), "domain")


server = FeatureService("docwriter_server", features=[said], description="Inputs of the teacher")
device = FeatureService("docwriter_device", features=[said], description="Inputs of the student")

docwriter = Distillation(
    "docwriter",
    spine=subjects,
    teacher=server,
    student=device,
    task=Causal(
        teacher="writer:teacher",
        vocabulary="pruned",
        context=128,
        replay=0.25,
        top_k=32,
        license="Apache-2.0",
    ),
    shape={"width": 128, "layers": 3, "heads": 4, "inner": 384},
    settings=Settings(epochs=4, batch=8, learning_rate=3e-3, weight_decay=1e-1, clip=1.0),
    seeds=2,
    split=(0.8, 0.08, 0.12),
    split_by="name",
    gates=[Gate("taught", at_least=0), Gate("student.agreement", at_least=0.15)],
)
