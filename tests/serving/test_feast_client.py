"""Feast's SDK reads from this server as from its own."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.support import CONTRACT, Server, serving


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url) as running:
        yield running


@pytest.fixture(scope="module", params=["open", "with a key"])
def answers(
    request: pytest.FixtureRequest, server: Server, guarded: Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[object]]]:
    """What Feast's client gives its caller, asked in a process of its own: importing feast warns and takes seconds."""
    folder = tmp_path_factory.mktemp("feast")
    auth, environment = "{type: no_auth}", dict(os.environ)
    if request.param == "with a key":
        server, auth = guarded, "{type: oidc, token_env_var: FEATURES_KEY}"
        environment["FEATURES_KEY"] = server.grant(feast="read:*")["feast"].removeprefix("Bearer ")
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
    script = Path(folder / "ask.py")
    script.write_text(_SCRIPT)
    asked = subprocess.run(
        [sys.executable, script, folder], env=environment, capture_output=True, text=True, timeout=200
    )
    assert asked.returncode == 0, asked.stderr
    found: dict[str, dict[str, list[object]]] = json.loads(asked.stdout.splitlines()[-1])
    return found


_SCRIPT = """
import json, sys
from datetime import timedelta
from feast import Entity, FeatureService, FeatureStore, FeatureView, Field, FileSource, ValueType
from feast.types import Bool, Float32, Float64, Int32, Int64, String

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
service = FeatureService(name="late", features=[punctuality])
store.apply([carrier, flight, punctuality, everything, service])
rows = [{"carrier": c} for c in ("UA", "B6", "AA", "??")]
by_name = store.get_online_features(features=["punctuality:late_rate", "punctuality:flights"], entity_rows=rows)
by_service = store.get_online_features(features=service, entity_rows=rows, full_feature_names=True)
types = store.get_online_features(
    features=[f"everything:{name}" for name in "abcg"], entity_rows=[{"flight": 1}, {"flight": 2}]
)
print(json.dumps({"name": by_name.to_dict(), "service": by_service.to_dict(), "types": types.to_dict()}))
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
