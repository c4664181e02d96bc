"""Feast's SDK reads from this server, and writes to it, as to its own."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import Array, UnixTimestamp
from tests.serving.support import (
    CARRIER,
    CONTRACT,
    EVERYTHING,
    LISTS,
    NOW,
    PUNCTUALITY,
    ROUTE,
    Server,
    contract_of,
    fill,
    serving,
    view,
)

MOMENTS = contract_of(
    PUNCTUALITY,
    EVERYTHING,
    ROUTE,
    LISTS,
    view("moments", [CARRIER], [("at", UnixTimestamp), ("all", Array(UnixTimestamp))]),
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url) as running:
        yield running


@pytest.fixture(scope="module", params=[pytest.param(how, marks=pytest.mark.accept) for how in ("open", "with a key")])
def answers(
    request: pytest.FixtureRequest, server: Server, guarded: Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[object]]]:
    """What Feast's client gives its caller, asked in a process of its own: importing feast warns and takes seconds."""
    folder = tmp_path_factory.mktemp("feast")
    auth, environment = "{type: no_auth}", dict(os.environ)
    if request.param == "with a key":
        server, auth = guarded, "{type: oidc, token_env_var: FEATURES_KEY}"
        environment["FEATURES_KEY"] = server.grant(feast="read:*")["feast"].removeprefix("Bearer ")
    configure(folder, server, auth)
    script = Path(folder / "ask.py")
    script.write_text(_SCRIPT)
    asked = subprocess.run(
        [sys.executable, script, folder], env=environment, capture_output=True, text=True, timeout=200
    )
    assert asked.returncode == 0, asked.stderr
    found: dict[str, dict[str, list[object]]] = json.loads(asked.stdout.splitlines()[-1])
    return found


def configure(folder: Path, server: Server, auth: str) -> None:
    """Makes a folder the repository of a Feast client of a server."""
    (folder / "feature_store.yaml").write_text(
        textwrap.dedent(f"""
        project: flights
        provider: local
        registry: {folder}/registry.db
        online_store: {{type: remote, path: "{str(server.http.base_url).rstrip("/")}"}}
        offline_store: {{type: file}}
        auth: {auth}
        entity_key_serialization_version: 3
        """)
    )
    (folder / "data.parquet").touch()


_SCRIPT = """
import json, sys
from datetime import timedelta
from feast import Entity, FeatureService, FeatureStore, FeatureView, Field, FileSource, ValueType
from feast.types import Array, Bool, Bytes, Float32, Float64, Int32, Int64, String, UnixTimestamp

store = FeatureStore(sys.argv[1])
carrier = Entity(name="carrier", join_keys=["carrier"], value_type=ValueType.STRING)
flight = Entity(name="flight", join_keys=["flight"], value_type=ValueType.INT64)
source = FileSource(path=sys.argv[1] + "/data.parquet", timestamp_field="event_timestamp")
punctuality = FeatureView(
    name="punctuality", entities=[carrier], ttl=timedelta(days=1), source=source,
    schema=[Field(name="late_rate", dtype=Float32), Field(name="flights", dtype=Int64),
            Field(name="carrier", dtype=String)],
)
everything = FeatureView(
    name="everything", entities=[flight], source=source,
    schema=[Field(name="a", dtype=Bool), Field(name="b", dtype=Int32), Field(name="c", dtype=Int64),
            Field(name="e", dtype=Float64), Field(name="g", dtype=String), Field(name="flight", dtype=Int64)],
)
seen = Entity(name="seen", join_keys=["seen"], value_type=ValueType.UNIX_TIMESTAMP)
token = Entity(name="token", join_keys=["token"], value_type=ValueType.BYTES)
opened = Entity(name="open", join_keys=["open"], value_type=ValueType.BOOL)
lists = FeatureView(
    name="lists", entities=[seen, token, opened], source=source,
    schema=[Field(name="b", dtype=Array(Int32)), Field(name="d", dtype=Array(Float32)),
            Field(name="g", dtype=Array(String)), Field(name="seen", dtype=UnixTimestamp),
            Field(name="token", dtype=Bytes), Field(name="open", dtype=Bool)],
)
service = FeatureService(name="late", features=[punctuality])
store.apply([carrier, flight, punctuality, everything, seen, token, opened, lists, service])
rows = [{"carrier": c} for c in ("UA", "B6", "AA", "??")]
by_name = store.get_online_features(features=["punctuality:late_rate", "punctuality:flights"], entity_rows=rows)
by_service = store.get_online_features(features=service, entity_rows=rows, full_feature_names=True)
types = store.get_online_features(
    features=[f"everything:{name}" for name in "abcg"], entity_rows=[{"flight": 1}, {"flight": 2}]
)
arrays = store.get_online_features(
    features=[f"lists:{name}" for name in "bdg"], entity_rows=[{"seen": 5, "token": "AP8=", "open": True}]
)
found = {"name": by_name, "service": by_service, "types": types, "arrays": arrays}
print(json.dumps({name: answer.to_dict() for name, answer in found.items()}))
"""


def test_by_feature(answers: dict[str, dict[str, list[object]]]) -> None:
    assert answers["name"] == {
        "carrier": ["UA", "B6", "AA", "??"],
        "late_rate": [0.10000000149011612, None, None, None],
        "flights": [2**60 + 1, 7, None, None],
    }


def test_by_service_with_full_names(answers: dict[str, dict[str, list[object]]]) -> None:
    assert answers["service"] == {
        "carrier": ["UA", "B6", "AA", "??"],
        "punctuality__late_rate": [0.10000000149011612, None, None, None],
        "punctuality__flights": [2**60 + 1, 7, None, None],
    }


def test_types(answers: dict[str, dict[str, list[object]]]) -> None:
    assert answers["types"] == {
        "flight": [1, 2], "a": [True, None], "b": [-(2**31), 5], "c": [2**63 - 1, None], "g": ["é😀", ""],
    }  # fmt: skip


def test_arrays_by_keys_of_every_type(answers: dict[str, dict[str, list[object]]]) -> None:
    assert answers["arrays"] == {
        "seen": [5], "token": ["AP8="], "open": [True], "b": [[1, -2]], "d": [[0.10000000149011612, 2.0]],
        "g": [["é", ""]],
    }  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param(how, marks=pytest.mark.accept) for how in ("open", "with a key")])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, dict[str, Any], dict[str, Any]]]:
    """What Feast's client reads after it has written, and what our own API says of the same rows."""
    folder = tmp_path_factory.mktemp("written")
    with EmbeddedRedis(folder / "redis") as embedded:
        fill(embedded.url, MOMENTS)
        (folder / "contract.json").write_bytes(MOMENTS.dumps())
        with serving(folder, embedded.url) as running:
            auth, environment = "{type: no_auth}", dict(os.environ)
            if request.param == "with a key":
                auth, environment["FEATURES_KEY"] = "{type: oidc, token_env_var: FEATURES_KEY}", ""
                scopes = "read:* push:punctuality push:moments"
                grants = running.grant(feast=scopes, reader="read:*")
                environment["FEATURES_KEY"] = grants["feast"].removeprefix("Bearer ")
                running.http.headers["authorization"] = grants["reader"]
            configure(folder, running, auth)
            (folder / "write.py").write_text(_WRITING)
            asked = subprocess.run(
                [sys.executable, folder / "write.py", folder], env=environment, capture_output=True, text=True,
                timeout=200,
            )  # fmt: skip
            assert asked.returncode == 0, asked.stderr
            carriers = {"carrier": ["UA", "AA", "B6", "NN"]}
            columns = ["punctuality:late_rate", "punctuality:flights", "moments:at", "moments:all"]
            own = running.lookup(features=columns, entities=carriers).json()
            yield running, json.loads(asked.stdout.splitlines()[-1]), own


_WRITING = """
import json, sys
from datetime import datetime, timedelta, timezone
import pandas as pd
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, ValueType
from feast.types import Array, Float32, Int64, String, UnixTimestamp

store = FeatureStore(sys.argv[1])
carrier = Entity(name="carrier", join_keys=["carrier"], value_type=ValueType.STRING)
source = FileSource(
    path=sys.argv[1] + "/data.parquet", timestamp_field="event_timestamp", created_timestamp_column="known_at"
)
punctuality = FeatureView(
    name="punctuality", entities=[carrier], ttl=timedelta(days=1), source=source,
    schema=[Field(name="late_rate", dtype=Float32), Field(name="flights", dtype=Int64),
            Field(name="carrier", dtype=String)],
)
moments = FeatureView(
    name="moments", entities=[carrier], source=source,
    schema=[Field(name="at", dtype=UnixTimestamp), Field(name="all", dtype=Array(UnixTimestamp)),
            Field(name="carrier", dtype=String)],
)
other = FeatureView(name="route", entities=[carrier], source=source,
    schema=[Field(name="flights", dtype=Int64), Field(name="carrier", dtype=String)])
store.apply([carrier, punctuality, moments, other])
zone = timezone(timedelta(hours=5))
now = datetime(2027, 1, 15, 8, tzinfo=timezone.utc)
times = [now - timedelta(minutes=1), (now - timedelta(minutes=1)).astimezone(zone), now - timedelta(hours=3)]
store.write_to_online_store("punctuality", pd.DataFrame({
    "carrier": ["UA", "NN", "B6"], "event_timestamp": times, "known_at": times, "late_rate": [0.25, None, 0.5],
    "flights": [2**60 + 3, 4, 5],
}))
seen = datetime(2026, 5, 4, 3, 2, 1, tzinfo=timezone.utc)
store.write_to_online_store("moments", pd.DataFrame({
    "carrier": ["UA", "AA"], "event_timestamp": [now] * 2, "known_at": [now] * 2, "at": [seen, None],
    "all": [[seen, now], None],
}))
rows = [{"carrier": c} for c in ("UA", "AA", "B6", "NN")]
found = store.get_online_features(
    features=["punctuality:late_rate", "punctuality:flights"], entity_rows=rows
).to_dict()
refused = []
for name, frame in {
    "punctuality": {"event_timestamp": [now + timedelta(seconds=1)], "late_rate": [0.1], "flights": [1]},
    "route": {"event_timestamp": [now], "flights": [1]},
}.items():
    try:
        store.write_to_online_store(name, pd.DataFrame({"carrier": ["UA"], "known_at": [now], **frame}))
    except Exception as error:
        refused.append(str(error))
print(json.dumps({"found": found, "refused": refused}))
"""


def test_what_feasts_client_writes_it_reads_and_our_own_answers(
    written: tuple[Server, dict[str, Any], dict[str, Any]],
) -> None:
    _, said, own = written
    # The row of B6 is older than the one that was there, and NN's time was told in another zone.
    assert said["found"] == {
        "carrier": ["UA", "AA", "B6", "NN"], "late_rate": [0.25, None, None, None], "flights": [2**60 + 3, None, 7, 4],
    }  # fmt: skip
    values = dict(zip(own["metadata"]["feature_names"], own["results"], strict=True))
    assert values["flights"]["values"] == [2**60 + 3, None, 7, 4]
    assert values["flights"]["event_timestamps"][3] == values["flights"]["event_timestamps"][0]
    # In seconds, as Feast's server answers.
    seen = int(datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC).timestamp())
    assert values["at"]["values"] == [seen, None, None, None]
    assert values["all"]["values"] == [[seen, NOW // 10**6], None, None, None]
    assert values["at"]["statuses"] == ["PRESENT", "NULL_VALUE", "NOT_FOUND", "NOT_FOUND"]


def test_what_is_refused_by_a_push_is_refused_here(written: tuple[Server, dict[str, Any], dict[str, Any]]) -> None:
    server, said, _ = written
    future, other = said["refused"]
    assert "is later than the server's time" in future
    if "authorization" in server.http.headers:
        assert "Error_code=403" in other
        assert "lacks the scope push:route" in other
    else:
        assert '"where":"df.flight","found":"is missing"' in other
