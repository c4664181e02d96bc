import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openapi_schema_validator import OAS31Validator

from isthmus.features.errors import ConfigurationError, DataError
from isthmus.features.files import write_atomically
from isthmus.serving.keys import PATTERN, Grants, Keyring, create_key, problems, required_marker
from isthmus.serving.limits import Limits
from isthmus.serving.settings import ServerSettings
from isthmus.serving.wire.errors import ForbiddenError
from tests.serving.http.test_openapi import resolved
from tests.serving.support import (
    CONTRACT,
    NOW,
    Server,
    free_port,
    make_package,
    read_all,
    require_discreet,
    serving,
    wait,
    write_keys,
)

UA = {"carrier": ["UA"]}
BY_SERVICE = {"feature_service": "late", "entities": UA}
BY_FEATURES = {"features": ["punctuality:flights"], "entities": UA}
PREDICT = {"entities": UA, "request": {"distance": [1]}}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Server]:
    """A server with a contract and a model; each test gives it keys of its own."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url) as running:
        running.deploy(make_package(folder / "package"))
        wait(lambda: running.http.get("/readyz").json().get("model") == "late", "the model")
        yield running


def ask(server: Server, path: str, body: object = None, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": key}
    return server.http.request("GET" if body is None else "POST", path, json=body, headers=headers)


@pytest.mark.parametrize(
    ("scopes", "path", "body", "missing"),
    [
        ("read:late", "/get-online-features", BY_SERVICE, None),
        ("read:*", "/get-online-features", BY_SERVICE, None),
        ("read:*", "/get-online-features", BY_FEATURES, None),
        ("read:other predict:late push:*", "/get-online-features", BY_SERVICE, "read:late"),
        ("read:lat", "/get-online-features", BY_SERVICE, "read:late"),
        ("read:late predict:* push:*", "/get-online-features", BY_FEATURES, "read:*"),
        ("read:late", "/get-online-features", {**BY_SERVICE, **BY_FEATURES}, "read:*"),
        # No scope, no word about what else there is.
        ("read:late", "/get-online-features", {**BY_SERVICE, "feature_service": "nothing"}, "read:nothing"),
        ("predict:late", "/predict", PREDICT, None),
        ("predict:*", "/predict", {**PREDICT, "model": "late"}, None),
        ("read:* push:* predict:other", "/predict", PREDICT, "predict:late"),
    ],
)
def test_a_scope_is_needed(guarded: Server, scopes: str, path: str, body: object, missing: str | None) -> None:
    keys = guarded.grant(owner=scopes)
    answer = ask(guarded, path, body, keys["owner"])
    assert answer.status_code == (200 if missing is None else 403), answer.text
    if missing is not None:
        assert answer.json()["error"] == "ForbiddenError"
        assert answer.json()["where"] == "API key owner"
        assert f"lacks the scope {missing}" in answer.json()["found"]
        assert "example" not in answer.json()
    wait(lambda: guarded.lines()[-1].get("key") == "owner", "the line of the request")


@pytest.mark.parametrize(
    "path",
    ["/readyz", "/nothing", "/docs/", "/docs/assets", "/docs/nothing", "/openapi.json/x",
     "//docs", "/Docs", "/docs/assetsx/swagger-ui.css"],
)  # fmt: skip
def test_any_key_opens_what_is_no_data_and_nothing_else_is_open(guarded: Server, path: str) -> None:
    keys = guarded.grant(owner="push:nothing")
    refused = ask(guarded, path)
    assert (refused.status_code, refused.json()["error"]) == (401, "UnauthenticatedError")
    assert refused.headers["www-authenticate"] == 'Bearer realm="isthmus"'
    assert ask(guarded, path, key=keys["owner"]).status_code in (200, 404)
    assert ask(guarded, "/healthz").status_code == 200


@pytest.mark.parametrize(
    ("scopes", "opened"),
    [
        ("status:*", {"/status", "/metrics", "/models", "/v2/models/late", "/v2/models/other"}),
        # Made before there was `status:*`: what may read every value may see their names and counts.
        ("read:*", {"/status", "/metrics", "/models", "/v2/models/late", "/v2/models/other"}),
        ("predict:late", {"/models", "/v2/models/late"}),
        ("predict:*", {"/models", "/v2/models/late", "/v2/models/other"}),
        ("predict:other", {"/v2/models/other"}),
        ("read:late push:* snapshot:*", set()),
        ("snapshot:late/7", set()),
    ],
)
def test_what_a_server_says_about_itself_has_a_scope(guarded: Server, scopes: str, opened: set[str]) -> None:
    key = guarded.grant(owner=scopes)["owner"]
    opened |= {f"{path}/ready" for path in opened if path.startswith("/v2/models/")}
    models = ("/v2/models/late", "/v2/models/other", "/v2/models/late/ready", "/v2/models/other/ready")
    for path in ("/status", "/metrics", "/models", *models):
        answer = ask(guarded, path, key=key)
        assert (answer.status_code != 403) == (path in opened), path
        if path not in opened:
            assert answer.json()["remedy"].endswith("--scope 'status:*'`")
            assert "punctuality" not in answer.text


def test_the_documentation_is_open_and_the_same_for_every_project(
    guarded: Server, server: Server, tmp_path: Path, redis_url: str
) -> None:
    guarded.grant(owner="push:nothing")
    with serving(tmp_path, redis_url) as empty:
        for path in ("/docs", "/docs/assets/swagger-ui.css", "/docs/assets/swagger-ui-bundle.js", "/openapi.json"):
            shown = guarded.http.get(path, headers={"sec-fetch-site": "cross-site"})
            assert shown.status_code == 200
            # One server has keys, a contract and a model, one has another contract, one has nothing at all.
            assert shown.content == server.http.get(path).content == empty.http.get(path).content
    # A client that does not tidy up the path.
    place = guarded.http.base_url.host, guarded.http.base_url.port or 0
    for path in ("/docs/assets/../../models", "/docs/assets/..%2f..%2fmodels", "/docs/assets//etc/passwd"):
        with socket.create_connection(place, timeout=10) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert read_all(raw).startswith(b"HTTP/1.1 404 ")


def test_only_a_whole_known_key_is_one(guarded: Server) -> None:
    secret = guarded.grant(owner="read:*")["owner"].removeprefix("Bearer ")
    stored = Keyring.read(guarded.keys).keys[0].sha256
    for wrong in (
        "", "Bearer", f"Basic {secret}", secret, f"Bearer {secret[:-1]}", f"Bearer {secret}x",
        f"Bearer {secret.upper()}", f"Bearer {secret} {secret}", f"Bearer {stored}", "Bearer " + "\u00e9" * 40,
    ):  # fmt: skip
        answer = guarded.http.post("/get-online-features", json=BY_FEATURES, headers={b"Authorization": wrong.encode()})
        assert answer.status_code == 401, wrong
        assert answer.headers["www-authenticate"].startswith("Bearer")
    for right in (f"Bearer {secret}", f"bearer   {secret}", f"BEARER {secret}"):
        assert ask(guarded, "/get-online-features", BY_FEATURES, right).status_code == 200, right


def test_keys_are_followed_while_the_server_runs(guarded: Server) -> None:
    first = guarded.grant(first="read:*")["first"]
    assert ask(guarded, "/get-online-features", BY_FEATURES, first).status_code == 200
    second = guarded.grant(second="read:*")["second"]
    # At once: nobody waits for a revoked key to end.
    assert ask(guarded, "/get-online-features", BY_FEATURES, first).status_code == 401
    assert ask(guarded, "/get-online-features", BY_FEATURES, second).status_code == 200
    guarded.keys.write_bytes(b"{")
    assert ask(guarded, "/get-online-features", BY_FEATURES).status_code == 401, "a broken file opens nothing"
    assert ask(guarded, "/get-online-features", BY_FEATURES, second).status_code == 200
    guarded.grant()
    assert ask(guarded, "/get-online-features", BY_FEATURES).status_code == 401
    # On purpose, on loopback.
    write_atomically(guarded.keys, Keyring(open=True).dumps(), mode=0o600)
    assert ask(guarded, "/get-online-features", BY_FEATURES).status_code == 200
    guarded.keys.unlink()
    assert ask(guarded, "/get-online-features", BY_FEATURES, second).status_code == 401


def test_a_key_file_that_was_broken_from_the_start_opens_nothing(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    (tmp_path / "keys.json").write_bytes(b'{"format_version": 1, "keys": [{"name": "x"}]}')
    with serving(tmp_path, redis_url) as server:
        answer = server.lookup(**BY_FEATURES)
        assert (answer.status_code, answer.json()["error"]) == (503, "NotReadyError")
        assert "is not a file of API keys" in answer.json()["found"]
        assert str(tmp_path) not in answer.text
        assert any(line.get("path") == str(tmp_path / "keys.json") for line in server.lines())


@pytest.fixture
def beyond_loopback(tmp_path: Path) -> dict[str, Any]:
    return {
        "contract": str(tmp_path / "contract.json"), "deployment": str(tmp_path / "d"), "redis": "redis://127.0.0.1:1",
        "keys": str(tmp_path / "keys.json"), "host": "0.0.0.0", "port": free_port(),  # noqa: S104
    }  # fmt: skip


def test_beyond_loopback_there_has_to_be_a_key(beyond_loopback: dict[str, Any]) -> None:
    keys = Path(beyond_loopback["keys"])
    for content in (None, b'{"format_version": 1, "keys": []}', b"{"):
        if content is not None:
            keys.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"can be reached from other machines, but .*isthmus keys create"):
            ServerSettings(**beyond_loopback)
    with pytest.raises(ConfigurationError, match="there are no API keys"):
        ServerSettings(**{**beyond_loopback, "keys": None})
    write_keys(keys, owner="read:*")
    assert not ServerSettings(**beyond_loopback).loopback


def test_beyond_loopback_the_last_key_closes_the_door_behind_it(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    key = write_keys(tmp_path / "keys.json", owner="read:*")["owner"]
    with serving(tmp_path, redis_url, host="0.0.0.0") as server:  # noqa: S104
        server.secrets.add(key)
        assert ask(server, "/get-online-features", BY_FEATURES, f"Bearer {key}").status_code == 200
        assert server.lookup(**BY_FEATURES).status_code == 401
        server.grant()
        for closed in (None, f"Bearer {key}"):
            assert ask(server, "/get-online-features", BY_FEATURES, closed).status_code == 401
        server.keys.unlink()
        for closed in (None, f"Bearer {key}"):
            assert ask(server, "/get-online-features", BY_FEATURES, closed).status_code == 401
        assert server.http.get("/healthz").status_code == 200


def test_a_key_that_is_sent_in_the_wrong_place_is_not_logged(guarded: Server) -> None:
    secret = guarded.grant(owner="read:*")["owner"].removeprefix("Bearer ")
    head = {"Authorization": f"Bearer {secret}"}
    # Not through the client that checks answers: what the caller has sent comes back to the caller.
    httpx.get(f"{guarded.http.base_url}/{secret}?key={secret}", headers={**head, "X-Request-Id": secret})
    wait(lambda: guarded.lines()[-1].get("path") == "unmatched", "the line of the request")
    assert guarded.lines()[-1]["id"] == "isthmus_..."
    require_discreet(guarded.log.read_text(), {secret})


def test_the_check_of_answers_and_logs_can_fail() -> None:
    for text, secrets in (("so: Traceback (most recent", set()), ('  File "x"', set()), ("it is hunter2", {"hunter2"})):
        with pytest.raises(AssertionError):
            require_discreet(text, secrets)


def test_a_key_is_long_and_random_and_only_its_hash_is_stored(tmp_path: Path) -> None:
    made = [create_key("owner", ["read:*", "read:*"], NOW) for _ in range(50)]
    assert len({secret for _, secret in made}) == len({key.sha256 for key, _ in made}) == 50
    for key, secret in made:
        assert PATTERN.fullmatch(secret.encode())
        assert key.scopes == ("read:*",)
    secret = write_keys(tmp_path / "keys.json", owner="read:*")["owner"]
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert secret.removeprefix("isthmus_") not in (tmp_path / "keys.json").read_text()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is not a file of API keys"),
        (b"\xff", "is not a file of API keys"),
        (b"[" * 5000, "is not a file of API keys"),
        (b'{"keys": [], "more": 1}', "is not a file of API keys"),
        (
            '{"keys": [{"name": "a", "sha256": "é", "scopes": [], "created_at": 1}]}'.encode(),
            "is not a file of API keys",
        ),
        (b'{"format_version": 2}', "has format 2; expected 1"),
    ],
)
def test_what_is_no_key_file_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / "keys.json").write_bytes(content)
    with pytest.raises(DataError, match=found):
        Keyring.read(tmp_path / "keys.json")


def test_names_and_scopes() -> None:
    assert problems("backend-1.eu", ["read:late", "push:*", "predict:late_model"]) == []
    assert problems("phone", ["snapshot:late", "snapshot:late/7", "snapshot:late/a%20b%2F%C3%BC", "snapshot:*"]) == []
    assert [problem.where for problem in problems("", [])] == ["name", "scope"]
    for name in ("-x", "a b", "a" * 65, "é", "a\n"):
        assert problems(name, ["read:*"]), name
    wrong = ["read", "read:", "write:*", "read:*late", "read:a b", ":*", "*", "*:*", "read:late:*x", "READ:*"]
    # The value of an owner is as in the path of the API.
    wrong += [
        "snapshot:late/",
        "snapshot:/7",
        "snapshot:late/7/8",
        "snapshot:late/a%2fb",
        "snapshot:*/7",
        "read:late/7",
    ]
    for scope in [*wrong, "snapshot:late/ü", "snapshot:late/a+b", "snapshot:late/%zz"]:
        assert problems("owner", [scope]), scope
    (problem,) = problems("owner", ["snapshot:late/a+b"])
    assert problem.expected == "snapshot:late/a%2Bb, as in the path of the API"


NAMES = st.sampled_from(["late", "lat", "latest", "*", "a:b"])
ACTIONS = st.sampled_from(["read", "push", "predict"])


@given(st.lists(st.tuples(ACTIONS, NAMES)), ACTIONS, NAMES)
def test_a_grant_is_what_its_scopes_say(scopes: list[tuple[str, str]], action: str, name: str) -> None:
    allowed = any(a == action and n in (name, "*") for a, n in scopes)
    grants = Grants("owner", frozenset(f"{a}:{n}" for a, n in scopes))
    with nullcontext() if allowed else pytest.raises(ForbiddenError, match=f"{action}:{re.escape(name)}"):
        grants.require(action, name)


def test_the_key_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    keys = tuple(create_key(name, ["read:*"], NOW)[0] for name in ("a", "b"))
    (tmp_path / "keys.json").write_bytes(Keyring(keys=keys).dumps())
    assert Keyring.read(tmp_path / "keys.json").keys == keys
    assert json.loads((tmp_path / "keys.json").read_text())["format_version"] == 1


@pytest.mark.parametrize(
    ("scopes", "rate", "path", "body", "status"),
    [
        (None, None, "/get-online-features", BY_FEATURES, 401),
        ("push:*", None, "/get-online-features", BY_FEATURES, 403),
        ("push:*", None, "/predict", PREDICT, 403),
        (None, None, "/models", None, 401),
        ("push:*", 1, "/models", None, 429),
    ],
)
def test_refusals_are_what_the_document_says(
    tmp_path: Path, redis_url: str, scopes: str | None, rate: int | None, path: str, body: object, status: int
) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, limits=Limits(requests_per_second=rate)) as server:
        server.deploy(make_package(tmp_path / "package"))
        wait(lambda: server.http.get("/readyz").json().get("model") == "late", "the model")
        document = server.http.get("/openapi.json").json()
        keys = server.grant(owner=scopes or "read:*")
        answer = [ask(server, path, body, keys["owner"] if scopes else None) for _ in range(2)][-1]
    assert answer.status_code == status
    described = document["paths"][path]["get" if body is None else "post"]["responses"][str(status)]
    assert {name.lower() for name in described["headers"]} <= set(answer.headers)
    OAS31Validator(resolved(document, described["content"]["application/json"]["schema"])).validate(answer.json())


def test_a_key_file_that_cannot_be_looked_at_opens_nothing(guarded: Server) -> None:
    assert guarded.http.get("/models").status_code == 401
    guarded.keys.unlink()
    guarded.keys.symlink_to(guarded.keys)
    assert guarded.http.get("/models").status_code == 401
    guarded.keys.unlink()


@pytest.mark.parametrize("lost", ["while it runs", "before it starts"])
def test_who_once_had_keys_stays_closed(tmp_path: Path, redis_url: str, lost: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    keys = tmp_path / "keys.json"
    if lost == "before it starts":
        required_marker(keys).touch()
    with serving(tmp_path, redis_url) as server:
        if lost == "while it runs":
            assert server.lookup(**BY_FEATURES).status_code == 200, "there has never been a key"
            key = server.grant(owner="read:*")["owner"]
            assert ask(server, "/get-online-features", BY_FEATURES, key).status_code == 200
            keys.unlink()
            assert ask(server, "/get-online-features", BY_FEATURES, key).status_code == 401
        closed = server.lookup(**BY_FEATURES)
        assert (closed.status_code, closed.json()["error"]) == (401, "UnauthenticatedError")
        assert "isthmus keys open" in closed.json()["remedy"]
        assert server.http.get("/healthz").status_code == 200
        key = server.grant(owner="read:*")["owner"]
        assert ask(server, "/get-online-features", BY_FEATURES, key).status_code == 200


def test_keys_can_be_required_from_the_start(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, require_keys=True) as server:
        assert server.lookup(**BY_FEATURES).status_code == 401
        key = server.grant(owner="read:*")["owner"]
        assert ask(server, "/get-online-features", BY_FEATURES, key).status_code == 200


def test_a_key_file_that_others_may_write_changes_nothing(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    keys = tmp_path / "keys.json"
    with serving(tmp_path, redis_url) as server:
        first = server.grant(owner="read:*")["owner"]
        assert ask(server, "/get-online-features", BY_FEATURES, first).status_code == 200
        spoils: list[Callable[[], None]] = [
            lambda: keys.chmod(0o620), lambda: keys.chmod(0o602), lambda: os.chown(keys, 12345, -1)
        ]  # fmt: skip
        for spoil in spoils:
            second = server.grant(intruder="read:*")["intruder"]
            assert ask(server, "/get-online-features", BY_FEATURES, second).status_code == 200
            first = server.grant(owner="read:*")["owner"]
            assert ask(server, "/get-online-features", BY_FEATURES, first).status_code == 200
            other = f"Bearer {write_keys(tmp_path / 'other.json', intruder='read:*')['intruder']}"
            keys.write_bytes((tmp_path / "other.json").read_bytes())
            spoil()
            assert ask(server, "/get-online-features", BY_FEATURES, other).status_code == 401
            assert ask(server, "/get-online-features", BY_FEATURES, first).status_code == 200, "the last good state"
            with pytest.raises(DataError, match=r"is writable by other users \(mode 6\d\d\)|belongs to user 12345"):
                Keyring.read(keys)


def test_a_key_file_that_is_gone_once_it_was_read_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        Keyring.checked(b"{}", str(tmp_path / "keys.json"))


def test_a_page_of_another_site_is_refused_where_there_is_no_key(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url) as server:
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            assert server.http.get("/models", headers={"sec-fetch-site": site}).status_code == status


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:{port}", None, 200), ("localhost:{port}", "http://localhost:{port}", 200),
        ("[::1]:{port}", "http://[::1]:{port}", 200), ("api.localhost", None, 200), ("LOCALHOST.", None, 200),
        ("shop.test", "http://shop.test", 200), ("127.1.2.3:{port}", "http://127.1.2.3:{port}", 200),
        ("evil.example", None, 403), ("evil.example:{port}", "http://evil.example:{port}", 403),
        ("127.0.0.1.evil.example", None, 403), ("localhost.evil.example", None, 403), ("", None, 403),
        ("127.0.0.1:{port}", "http://evil.example", 403), ("127.0.0.1:{port}", "null", 403),
        ("localhost:{port}", "http://localhost:1", 403), ("127.0.0.1:{port}", "http://localhost:{port}", 403),
        ("10.0.0.1", None, 403), ("0.0.0.0:{port}", None, 403), ("127.0.0.1:{port}@evil.example", None, 403),
    ],
)  # fmt: skip
def test_without_keys_a_name_for_this_machine_opens_nothing(
    unguarded: Server, host: str, origin: str | None, status: int
) -> None:
    port = unguarded.http.base_url.port
    headers = {"host": host.format(port=port), **({} if origin is None else {"origin": origin.format(port=port)})}
    pushed = {"push_source_name": "route", "df": {
        "carrier": ["UA"], "flight": [1], "event_timestamp": [NOW], "flights": [5]}}  # fmt: skip
    answer = unguarded.http.post("/push", json=pushed, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 403:
        assert answer.json()["error"] == "ForbiddenError"
        assert "isthmus keys create" in answer.json()["remedy"]
    assert unguarded.http.get("/healthz", headers=headers).status_code == 200


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Server]:
    """A server without keys that has a name."""
    folder = tmp_path_factory.mktemp("unguarded")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url, hosts=("shop.test",)) as running:
        yield running
