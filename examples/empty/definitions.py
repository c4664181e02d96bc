"""Predict at the start of a visit whether the visitor will buy. Replace source, view and spine with your own."""

from datetime import timedelta

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import Entity, Expect, FeatureService, Field, Float64, Int64, Source, String, spine, transform

visits = Source(
    "visits",
    path="data/visits.csv",
    timestamp="began_at",
    known="ended_at",
    types={"spent": Float64, "saved": Int64},  # the other columns of a CSV file are text
)
visitor = Entity("visitor", join_keys={"visitor": String}, description="A visitor of the shop")


@transform(
    entities=[visitor],
    sources=[visits],
    ttl=timedelta(days=30),
    schema=[
        Field("visits_7d", Int64, "device"),
        Field("spent_7d", Float64, "device"),
        Field("page", String, "device", description="Page on which the last visit ended"),
        Field("saved", Int64, description="Items that the last visit saved for later"),
    ],
    expectations=[Expect.between("visits_7d", 1, 10_000), Expect.present("spent_7d")],
)
def habits(visits: DataFrame) -> DataFrame:
    """A visitor's last seven days and last visit, known when the visit has ended."""
    week = Window.partitionBy("visitor").orderBy(F.unix_seconds("began_at")).rangeBetween(1 - 7 * 86400, 0)
    return visits.select(
        "visitor",
        "began_at",
        "ended_at",
        F.count("*").over(week).alias("visits_7d"),
        F.sum("spent").over(week).alias("spent_7d"),
        "page",
        F.col("saved").cast("bigint").alias("saved"),
    )


@spine(
    entities=[visitor], sources=[visits], label=Field("bought", Int64, description="1 if the visit ended in a purchase")
)
def beginnings(visits: DataFrame) -> DataFrame:
    """One example per visit: the visitor at its start, and whether it ended in a purchase."""
    return visits.select(
        "visitor",
        F.col("began_at").alias("event_timestamp"),
        F.col("ended_at").alias("known_at"),
        (F.col("spent") > 0).cast("bigint").alias("bought"),
    )


profile = FeatureService("profile", features=[habits], description="Features of a visitor")
