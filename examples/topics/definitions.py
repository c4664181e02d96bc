"""Topics of software descriptions: a fine-tuned MiniLM teaches a student of half a megabyte.

The texts are the descriptions of Debian's packages (`corpus.py`). A thousand of them have a label; the teacher
(`finetune.py`) answers all others.
"""

from corpus import SPLIT
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Bag,
    Distillation,
    Entity,
    FeatureService,
    Field,
    Gate,
    Pretrained,
    RequestSource,
    Settings,
    Source,
    String,
    Temperature,
    Text,
    spine,
)

descriptions = Source("descriptions", path="data/articles.parquet")
package = Entity("package", join_keys={"name": String}, description="A package of Debian")
origin = Entity("origin", join_keys={"source": String}, description="The source that a package is built from")
article = RequestSource("article", schema=[Field("body", String)], description="The text to classify")


@spine(
    entities=[package, origin],
    sources=[descriptions],
    request=article,
    label=Field("topic", String, description="Section of the package; null for most training texts"),
)
def articles(descriptions: DataFrame) -> DataFrame:
    """All descriptions. They have no times, so they are valid from the beginning."""
    always = F.timestamp_seconds(F.lit(0))
    return descriptions.select(
        "name",
        "source",
        always.alias("event_timestamp"),
        always.alias("known_at"),
        F.col("text").alias("body"),
        "topic",
    )


on_phone = FeatureService("topics_device", features=[article], description="Input of the student")

topics = Distillation(
    "topics",
    spine=articles,
    teacher=on_phone,
    student=on_phone,
    task=Text(
        teacher=Pretrained("models/topic-minilm", tokens=128),
        student=Bag(vocabulary=9_300, width=48),
        calibration=Temperature(),
    ),
    settings=Settings(epochs=30, batch=64, learning_rate=5e-3, weight_decay=1e-2),
    split=SPLIT,
    split_by="source",
    gates=[Gate("gap_closed", at_least=0.6), Gate("student.accuracy", at_least=0.75)],
)
