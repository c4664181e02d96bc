"""What the server counts: against naive counts, over real traffic, from several workers, and what Grafana asks for."""

import dataclasses
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import ViewContract
from isthmus.features.online.plan import LookupPlan
from isthmus.features.request.graph import RowGraph
from isthmus.serving.lookup.lookup import Lookup
from isthmus.serving.metrics.counters import BUCKETS, Tally
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.settings import METRICS_FOLDER
from isthmus.serving.state import State
from isthmus.serving.wire.formats import Format
from tests.features.support import encode_row
from tests.serving.support import (
    CONTRACT,
    HOUR,
    NOW,
    PUNCTUALITY,
    ROUTE,
    Server,
    contract_of,
    free_port,
    serving,
    wait,
)

OPENMETRICS = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75"
WORDS = ("PRESENT", "NULL_VALUE", "OUTSIDE_MAX_AGE", "NOT_FOUND")
LOOKUP = {"features": ["punctuality:flights"], "entities": {"carrier": ["UA", "UA", "AA", "OO", "??"]}}
PREDICT = {"entities": {"carrier": ["UA", "AA"]}, "request": {"distance": [1, None]}}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(families: Iterable[Metric]) -> Samples:
    """Name and sorted labels to the value; a series that is there twice is a fault."""
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def scrape(http: httpx.Client) -> Samples:
    answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    return samples_of(parse_text(answer.text))


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def of_metrics(metrics: Metrics) -> Samples:
    return samples_of(parse_text(metrics.exposition("")[0].decode()))


VALUES = {"late_rate": st.none() | st.floats(width=32), "flights": st.none() | st.integers(-(2**63), 2**63 - 1)}
TIMES = st.sampled_from([NOW - HOUR, NOW, NOW + 1, NOW - 24 * HOUR - 1]) | st.integers(1, 2 * NOW)
ROWS = st.lists(st.none() | st.tuples(TIMES, TIMES, st.fixed_dictionaries(VALUES)), min_size=1)
FEATURES = st.lists(st.sampled_from(sorted(VALUES)), min_size=1, unique=True)
TWIN = dataclasses.replace(PUNCTUALITY, name="twin", ttl=None)


def _none(name: str) -> RowGraph:
    raise KeyError(name)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@given(asked=st.lists(st.tuples(st.sampled_from([PUNCTUALITY, TWIN]), FEATURES, ROWS), max_size=5))
def test_values_and_freshness_are_what_the_answers_say(
    tmp_path_factory: pytest.TempPathFactory,
    shared: bool,
    asked: list[tuple[ViewContract, list[str], list[tuple[int, int, dict[str, Any]] | None]]],
) -> None:
    contract = contract_of(PUNCTUALITY, TWIN)
    state = State(Generations(contract))
    metrics = Metrics(lambda: state, lambda: 3 * NOW, tmp_path_factory.mktemp("counted") if shared else None)
    values: Counter[tuple[str, str]] = Counter()
    newest: dict[str, int] = {}
    for view, features, rows in asked:
        lookup = Lookup(contract, [(view.name, feature) for feature in features], full_names=False, graphs=_none)
        answers = lookup.plan.decode([[row and encode_row(view, *row)] for row in rows], len(rows), NOW, {})
        metrics.read(answers, lookup.bits)
        # The naive count: of the words in Feast's JSON.
        for column in orjson.loads(lookup.encode({}, len(rows), answers, {}))["results"]:
            for word in column["statuses"]:
                values[view.name, word] += 1
        for row in rows:
            # A row from the future is not found, and its time was not served.
            if row and max(row[:2]) <= NOW:
                newest[view.name] = max(newest.get(view.name, 0), row[1])
    found = of_metrics(metrics)
    metrics.close()
    counts = {key: count for key, count in found.items() if key[0] == "isthmus_view_values_total" and count}
    assert counts == {
        ("isthmus_view_values_total", (("status", word), ("view", name))): count
        for (name, word), count in values.items()
    }
    ages = {dict(labels)["view"]: age for (name, labels), age in found.items() if name.endswith("freshness_seconds")}
    assert ages == pytest.approx({view: (3 * NOW - known) / 1e6 for view, known in newest.items()})


DURATIONS = st.one_of(st.floats(0, 10), st.sampled_from(BUCKETS))


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@given(durations=st.lists(DURATIONS, min_size=1))
def test_a_histogram_is_what_a_naive_count_says(
    tmp_path_factory: pytest.TempPathFactory, shared: bool, durations: list[float]
) -> None:
    tally = Tally(tmp_path_factory.mktemp("counted") if shared else None)
    seconds = tally.histogram("answer_seconds", "Time.", "route").seconds("/a")
    for duration in durations:
        seconds.observe(duration)
    found = samples_of(tally.collect())
    tally.close()
    for bound in BUCKETS:
        within = sum(duration <= bound for duration in durations)
        assert value(found, "answer_seconds_bucket", route="/a", le=str(bound)) == within
    assert value(found, "answer_seconds_bucket", route="/a", le="+Inf") == len(durations)
    assert value(found, "answer_seconds_count", route="/a") == len(durations)
    assert value(found, "answer_seconds_sum", route="/a") == pytest.approx(sum(durations))


def test_the_last_run_stays_when_its_worker_has_ended(tmp_path: Path) -> None:
    ended = Metrics(State, lambda: NOW, tmp_path)
    with ended.run("late", 2):
        pass
    expected = ended.statistics("late")
    ended.close()
    for file in tmp_path.glob(f"*_{os.getpid()}.db"):
        file.rename(file.with_name(file.name.replace(f"_{os.getpid()}.db", "_1.db")))
    mark_process_dead(1, tmp_path)  # type: ignore[no-untyped-call]
    another = Metrics(State, lambda: NOW, tmp_path)
    found = another.statistics("late")
    another.close()
    assert found == expected
    assert found.last_inference > 0


def test_freshness_ages_without_traffic_and_ends_with_its_view() -> None:
    now, state = NOW, State(Generations(CONTRACT))
    metrics = Metrics(lambda: state, lambda: now)
    plan = LookupPlan(CONTRACT, ["route"])
    row = encode_row(ROUTE, NOW - HOUR, NOW - HOUR, {"flights": 3})
    metrics.read(plan.decode([[row]], 1, NOW, {}), plan.bits([("route", "flights")]))
    assert value(of_metrics(metrics), "isthmus_view_freshness_seconds", view="route") == 3600
    now += HOUR
    assert value(of_metrics(metrics), "isthmus_view_freshness_seconds", view="route") == 7200
    state = State(Generations(contract_of(PUNCTUALITY)))
    assert not [name for name, _ in of_metrics(metrics) if name == "isthmus_view_freshness_seconds"]
    state = State()
    assert not [name for name, _ in of_metrics(metrics) if name == "isthmus_contract_info"]


def difference(http: httpx.Client, before: Samples) -> Samples:
    """What has been counted since, but for the reading itself."""
    after = scrape(http)
    assert all(after[key] >= count for key, count in before.items() if key[0].endswith(("_total", "_count", "_bucket")))
    return {key: count - before.get(key, 0.0) for key, count in after.items()}


def test_requests_are_counted_by_route_method_and_status(watched: Server) -> None:
    before = scrape(watched.http)
    for _ in range(3):
        assert watched.lookup(**LOOKUP).status_code == 200
    assert watched.lookup(features=["a:b"], entities={}).status_code == 404
    assert watched.predict(**PREDICT).status_code == 200
    assert watched.http.get("/predict").status_code == 405
    assert watched.http.head("/healthz").status_code == 200
    found = difference(watched.http, before)
    requests = {
        tuple(text for _, text in labels): count
        for (name, labels), count in found.items()
        if name == "isthmus_requests_total" and count and dict(labels)["route"] != "/metrics"
    }
    assert requests == {
        ("POST", "/get-online-features", "200"): 3,
        ("POST", "/get-online-features", "404"): 1,
        ("POST", "/predict", "200"): 1,
        ("GET", "/predict", "405"): 1,
        ("HEAD", "/healthz", "200"): 1,
    }
    route = "/get-online-features"
    name = "isthmus_request_duration_seconds_count"
    assert value(found, name, route=route, status_class="2xx") == 3
    assert value(found, name, route=route, status_class="4xx") == 1
    assert value(found, "isthmus_errors_total", route=route, error="NotFoundError") == 1
    assert value(found, "isthmus_errors_total", route="/predict", error="NotAllowedError") == 1
    assert value(found, "isthmus_model_duration_seconds_count", model="late") == 1
    assert value(found, "isthmus_model_rows_total", model="late") == 2


def test_a_requests_time_is_its_wait_for_the_store_and_the_rest(watched: Server) -> None:
    before = scrape(watched.http)
    for _ in range(5):
        watched.lookup(**LOOKUP)
    watched.lookup(features=["a:b"], entities={})
    found = difference(watched.http, before)
    route = "/get-online-features"
    assert value(found, "isthmus_store_duration_seconds_count", route=route) == 5
    assert value(found, "isthmus_serving_duration_seconds_count", route=route) == 6
    parts = [value(found, f"isthmus_{part}_duration_seconds_sum", route=route) for part in ("store", "serving")]
    name = "isthmus_request_duration_seconds_sum"
    whole = sum(value(found, name, route=route, status_class=kind) for kind in ("2xx", "4xx"))
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(whole)
    assert not [key for key in found if key[0].startswith("isthmus_store") and ("route", "/healthz") in key[1]]


def test_values_are_counted_by_view_and_status_of_lookups_and_predictions(watched: Server) -> None:
    def counts() -> list[float]:
        found = difference(watched.http, before)
        return [value(found, "isthmus_view_values_total", view="punctuality", status=word) for word in WORDS]

    before = scrape(watched.http)
    watched.lookup(**LOOKUP)
    assert counts() == [2, 1, 1, 1]
    # Of two features for UA, and for AA, which has nulls.
    watched.predict(**PREDICT)
    assert counts() == [4, 3, 1, 1]
    # B6 has one of two values.
    for form in Format:
        asked = {"features": ["punctuality:late_rate", "punctuality:flights"], "entities": {"carrier": ["B6"]}}
        watched.http.post("/get-online-features", json=asked, headers={"accept": form.value})
    assert counts() == [7, 6, 1, 1]
    # By the fixed clock of the settings: UA and AA were known an hour before it.
    assert value(scrape(watched.http), "isthmus_view_freshness_seconds", view="punctuality") == 3600


def test_a_model_that_fails_is_counted(watched: Server) -> None:
    before = scrape(watched.http)
    failing = watched.predict(entities={"carrier": ["UA"]}, request={"distance": [1e300]})
    assert failing.status_code == 500, failing.text
    assert watched.predict(**PREDICT).status_code == 200
    found = difference(watched.http, before)
    assert value(found, "isthmus_prediction_failures_total", model="late") == 1
    assert value(found, "isthmus_model_duration_seconds_count", model="late") == 2
    assert value(found, "isthmus_errors_total", route="/predict", error="DefectError") == 1


def test_what_a_caller_makes_up_never_becomes_a_label(watched: Server) -> None:
    scrape(watched.http)
    for number in range(30):
        watched.http.get(f"/invented/{number}")
        watched.http.get(f"/docs/assets/invented-{number}")
        watched.lookup(features=[f"invented{number}:flights"], entities={"carrier": ["UA"]})
        watched.lookup(feature_service=f"invented{number}", entities={"carrier": ["UA"]})
        watched.predict(model=f"invented{number}", **PREDICT)
    for method in ("PROPFIND", "LOCK", "REPORT"):
        watched.http.request(method, "/healthz")
    found = scrape(watched.http)
    assert not [key for key in found if "invented" in str(key) or "LOCK" in str(key)]
    assert value(found, "isthmus_requests_total", route="unmatched", method="GET", status="404") == 30
    assert value(found, "isthmus_requests_total", route="/docs/assets", method="GET", status="404") == 30
    assert value(found, "isthmus_requests_total", route="/healthz", method="other", status="405") == 3


def test_requests_in_flight(watched: Server) -> None:
    assert value(scrape(watched.http), "isthmus_requests_in_flight") == 0
    with httpx.Client(base_url=watched.http.base_url) as other, released() as body:
        asking = threading.Thread(target=other.post, args=("/predict",), kwargs={"content": body})
        asking.start()
        wait(lambda: value(scrape(watched.http), "isthmus_requests_in_flight") == 1, "the request to count")
        body.release()
        asking.join()
        wait(lambda: value(scrape(watched.http), "isthmus_requests_in_flight") == 0, "it to count no more")


def test_a_client_that_leaves_is_no_request_in_flight(watched: Server) -> None:
    host, port = watched.http.base_url.host, watched.http.base_url.port
    assert port
    before = scrape(watched.http)
    with socket.create_connection((host, port)) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        wait(lambda: value(scrape(watched.http), "isthmus_requests_in_flight") == 1, "the request to count")
    wait(lambda: value(scrape(watched.http), "isthmus_requests_in_flight") == 0, "it to count no more")
    found = difference(watched.http, before)
    assert value(found, "isthmus_requests_total", route="/predict", method="POST", status="none") == 1
    assert value(found, "isthmus_errors_total", route="/predict", error="DefectError") == 0


class released:  # noqa: N801 - reads as what it is: a body that ends when it is released
    """A request body whose last byte waits."""

    def __init__(self) -> None:
        self._last = threading.Event()

    def __enter__(self) -> "released":
        return self

    def __exit__(self, *_: object) -> None:
        self._last.set()

    def __iter__(self) -> Iterator[bytes]:
        yield b"{"
        self._last.wait(10)
        yield b"}"

    def release(self) -> None:
        self._last.set()


def test_both_formats_say_the_same(watched: Server) -> None:
    plain = watched.http.get("/metrics")
    openmetrics = watched.http.get("/metrics", headers={"accept": OPENMETRICS})
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert openmetrics.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert openmetrics.text.endswith("# EOF\n")
    first, second = samples_of(parse_text(plain.text)), samples_of(parse_openmetrics(openmetrics.text))  # type: ignore[no-untyped-call]
    assert first.keys() <= second.keys()
    assert {key for key in second.keys() - first.keys() if ("route", "/metrics") not in key[1]} == set()
    for odd in ("*/*", "application/json", "text/plain;version=abc", "\xff", ""):
        assert watched.http.get("/metrics", headers=[(b"accept", odd.encode("latin-1"))]).status_code == 200


def test_the_contract_and_the_model_in_use(watched: Server) -> None:
    (model,) = watched.http.get("/models").json()["models"]
    labels = {"project": "flights", "contract": CONTRACT.hash, "model": "late", "package": model["package"]}
    assert value(scrape(watched.http), "isthmus_contract_info", **labels) == 1


def test_the_first_answer_is_timed_from_the_start_of_the_process(watched: Server) -> None:
    first = value(scrape(watched.http), "isthmus_first_answer_seconds")
    assert 0 < first < 60
    watched.lookup(**LOOKUP)
    assert value(scrape(watched.http), "isthmus_first_answer_seconds") == first


def test_a_redis_that_does_not_answer_and_a_missing_contract_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those of another program: one worker counts for itself.
    for name in ("PROMETHEUS_MULTIPROC_DIR", METRICS_FOLDER):
        monkeypatch.setenv(name, str(tmp_path / "missing"))
    with serving(tmp_path, f"redis://127.0.0.1:{free_port()}") as server:
        assert server.lookup(**LOOKUP).status_code == 503
        server.contract.write_bytes(CONTRACT.dumps())
        wait(lambda: server.lookup(**LOOKUP).json()["error"] == "DependencyError", "the contract")
        found = scrape(server.http)
    route = "/get-online-features"
    assert value(found, "isthmus_errors_total", route=route, error="NotReadyError") >= 1
    assert value(found, "isthmus_errors_total", route=route, error="DependencyError") == 1
    assert value(found, "isthmus_store_duration_seconds_count", route=route) == 1


@pytest.mark.accept
@pytest.mark.slowest
def test_any_worker_answers_for_all_also_for_the_dead(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    ok = {"route": "/get-online-features", "method": "POST", "status": "200"}

    def total() -> float:
        with httpx.Client(base_url=server.http.base_url) as http:
            return value(scrape(http), "isthmus_requests_total", **ok)

    def own(pid: int) -> float:
        return value(counted(folder / f"counter_{pid}.db"), "isthmus_requests_total", **ok)

    def ask() -> None:
        # Each on a connection of its own, so that either worker may take it.
        with httpx.Client(base_url=server.http.base_url) as http:
            assert http.post("/get-online-features", json=LOOKUP).status_code == 200

    with serving(tmp_path, redis_url, workers=2) as server:
        folder = folder_of(server)
        wait(lambda: len(workers(folder)) == 2, "both workers")
        asked = 0
        while asked < 20 or any(own(pid) == 0 for pid in workers(folder)):
            ask()
            asked += 1
            assert asked < 2000, "one worker takes all requests"
        wait(lambda: total() == asked, "all to be counted")
        # Every connection, and so every worker, says the same.
        assert {total() for _ in range(20)} == {asked}
        assert sum(own(pid) for pid in workers(folder)) == asked
        answer = server.http.get("/metrics", headers={"accept": OPENMETRICS})
        openmetrics = samples_of(parse_openmetrics(answer.text))  # type: ignore[no-untyped-call]
        assert value(openmetrics, "isthmus_requests_total", **ok) == asked
        assert value(scrape(server.http), "isthmus_view_freshness_seconds", view="punctuality") == 3600

        # A worker dies with a request in flight: what it has counted stays, what it was busy with does not.
        with httpx.Client(base_url=server.http.base_url) as http, released() as body:
            busy = threading.Thread(target=attempt, args=(http, body))
            busy.start()
            wait(lambda: value(scrape(server.http), "isthmus_requests_in_flight") == 1, "the request to count")
            busy_with = {pid: counted(folder / f"gauge_livesum_{pid}.db") for pid in workers(folder)}
            (victim,) = [pid for pid, found in busy_with.items() if value(found, "isthmus_requests_in_flight")]
            os.kill(victim, signal.SIGKILL)
            busy.join()
        with httpx.Client(base_url=server.http.base_url, timeout=10) as http:
            wait(lambda: value(scrape(http), "isthmus_requests_in_flight") == 0, "the dead to count no more")
            wait(lambda: victim not in workers(folder) and len(workers(folder)) == 2, "another worker")
            assert total() == asked
            ask()
            wait(lambda: total() == asked + 1, "the new request to count")
    assert not folder.exists()


def attempt(http: httpx.Client, body: Iterable[bytes]) -> None:
    with pytest.raises(httpx.TransportError):
        http.post("/predict", content=body)


def folder_of(server: Server) -> Path:
    """Where the workers count together: they were told in their environment."""
    pid = server.process.pid
    child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    (entry,) = [entry for entry in environment if entry.startswith(METRICS_FOLDER.encode() + b"=")]
    return Path(entry.partition(b"=")[2].decode())


def workers(folder: Path) -> list[int]:
    """The workers that are not known to be dead."""
    return [int(file.stem.rpartition("_")[2]) for file in folder.glob("gauge_livesum_*.db")]


def counted(file: Path) -> Samples:
    """What one worker has counted, of one type."""
    there = [str(file)] if file.exists() else []
    return samples_of(MultiProcessCollector.merge(there))  # type: ignore[no-untyped-call]
