"""Tests of when a flight's outcome is known: in two time zones, across midnight, and if it never arrives."""

from pathlib import Path

import pytest
from definitions import carrier_punctuality, outcomes
from pyspark.sql import DataFrame, SparkSession

from isthmus.project import Project, session

FLIGHTS = [
    # flight, destination, hour of departure (UTC), minute, departure delay, local arrival time, arrival delay
    (1, "BOS", "2013-06-01 16:00:00", 30, 5, 1340, 2),
    (2, "LAX", "2013-06-01 23:00:00", 0, 0, 2145, -10),
    (3, "BOS", "2013-06-02 03:00:00", 30, 10, 35, 20),
    (4, "BOS", "2013-06-01 16:00:00", 0, None, None, None),
]
ZONES = [("BOS", "America/New_York"), ("LAX", "America/Los_Angeles")]


@pytest.fixture(scope="module")
def known() -> dict[int, str]:
    """UTC time at which the outcome is known, by flight."""
    with session("sail") as spark:
        found = outcomes(flights(spark), spark.createDataFrame(ZONES, "faa string, tzone string"))
        rows = found.selectExpr("flight", "date_format(known, 'yyyy-MM-dd HH:mm') AS known").collect()
        return {row.flight: row.known for row in rows}


def flights(spark: SparkSession) -> DataFrame:
    """`FLIGHTS` with the columns of the source."""
    schema = "flight int, dest string, hour string, minute bigint, dep_delay bigint, arr_time bigint, arr_delay bigint"
    return spark.createDataFrame(FLIGHTS, schema).selectExpr("*", "CAST(hour AS timestamp) AS time_hour")


def test_a_landing_is_in_local_time_of_the_destination(known: dict[int, str]) -> None:
    assert known[1] == "2013-06-01 17:40"
    assert known[2] == "2013-06-02 04:45"


def test_a_flight_after_midnight_lands_on_the_next_day(known: dict[int, str]) -> None:
    assert known[3] == "2013-06-02 04:35"


def test_a_flight_that_never_arrives_is_known_a_day_later(known: dict[int, str]) -> None:
    assert known[4] == "2013-06-02 16:00"


def test_the_definitions_are_valid() -> None:
    contract = Project(Path(__file__).parent).definitions.contract
    assert carrier_punctuality.name in contract.views
