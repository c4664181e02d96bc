"""A server over a Redis that refuses: what it says, whether one is to try again, and that it needs no restart."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis

from isthmus.features.redis.embedded import binary
from tests.refusing import ARGUMENTS, HALF, PASSWORD, READER, STATES, fill_for_loading, loading
from tests.servers import redis_server
from tests.serving.support import CONTRACT, NOW, Server, fill, free_port, serving

LOOKUP = {"features": ["punctuality:flights"], "entities": {"carrier": ["B6"]}}


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    found = free_port()
    with redis_server(
        tmp_path / "redis", "--port", str(found), *ARGUMENTS, client=redis.Redis(port=found, password=PASSWORD)
    ):
        fill(f"redis://:{PASSWORD}@127.0.0.1:{found}")
        yield found


def _push(server: Server, flights: int) -> httpx.Response:
    df = {"carrier": ["B6"], "event_timestamp": [NOW], "late_rate": [None], "flights": [flights]}
    return server.http.post("/push", json={"push_source_name": "punctuality", "df": df})


def _require_refused(answer: httpx.Response, found: str, *, passes: bool) -> None:
    assert (answer.status_code, answer.json()["error"]) == (503, "DependencyError")
    assert found in answer.json()["found"]
    assert answer.json()["remedy"]
    assert answer.headers.get("retry-after") == ("1" if passes else None)


@pytest.mark.parametrize("name", STATES)
def test_a_push_that_is_refused_says_why_and_lookups_go_on(tmp_path: Path, port: int, name: str) -> None:
    state = STATES[name]
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with (
        redis.Redis(port=port, password=PASSWORD) as admin,
        serving(tmp_path, f"redis://:{PASSWORD}@127.0.0.1:{port}") as server,
    ):
        assert server.lookup(**LOOKUP).json()["results"][1]["values"] == [7]
        with state.entered(admin, tmp_path / "redis"):
            _require_refused(_push(server, 8), state.found, passes=state.passes)
            looked, ready = server.lookup(**LOOKUP), server.http.get("/readyz")
            if state.reads:
                assert looked.json()["results"][1]["values"] == [7]
                assert ready.status_code == 200
            else:
                _require_refused(looked, state.found, passes=state.passes)
                _require_refused(ready, state.found, passes=state.passes)
        assert _push(server, 9).json() == {"rows": 1, "written": 1}
        assert server.lookup(**LOOKUP).json()["results"][1]["values"] == [9]


@pytest.mark.parametrize("user", [READER, HALF])
def test_a_user_that_may_only_read(tmp_path: Path, port: int, user: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, f"redis://{user}:{PASSWORD}@127.0.0.1:{port}") as server:
        _require_refused(_push(server, 8), "does not allow its user this command (", passes=False)
        assert server.lookup(**LOOKUP).json()["results"][1]["values"] == [7]


def test_a_password_that_is_changed_while_the_server_runs(tmp_path: Path, port: int) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with (
        redis.Redis(port=port, password=PASSWORD) as admin,
        serving(tmp_path, f"redis://:{PASSWORD}@127.0.0.1:{port}") as server,
    ):
        assert server.lookup(**LOOKUP).status_code == 200
        admin.config_set("requirepass", "another")
        admin.client_kill_filter(_type="normal", skipme=True)
        for answer in (server.lookup(**LOOKUP), _push(server, 8), server.http.get("/readyz")):
            _require_refused(answer, "does not accept the user and the password", passes=False)
        admin.config_set("requirepass", PASSWORD)
        assert server.lookup(**LOOKUP).json()["results"][1]["values"] == [7]


def test_another_primary_is_found_by_the_same_name(tmp_path: Path) -> None:
    """The name is a link to a socket, which new connections follow and old ones do not, as with a name in the DNS."""
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    link = tmp_path / "primary.sock"
    with ExitStack() as stack:
        clients = []
        for name in ("one", "two"):
            place = tmp_path / f"{name}.sock"
            client = stack.enter_context(redis.Redis(unix_socket_path=str(place)))
            stack.enter_context(redis_server(tmp_path / name, "--port", "0", "--unixsocket", str(place), client=client))
            fill(f"unix://{place}")
            clients.append(client)
        link.symlink_to("one.sock")
        server = stack.enter_context(serving(tmp_path, f"unix://{link}"))
        assert _push(server, 8).json() == {"rows": 1, "written": 1}
        clients[0].replicaof("127.0.0.1", 1)
        _require_refused(_push(server, 9), "is a replica and takes no writes", passes=False)
        link.unlink()
        link.symlink_to("two.sock")
        assert _push(server, 9).json() == {"rows": 1, "written": 1}
        assert server.lookup(**LOOKUP).json()["results"][1]["values"] == [9]
        # What was left is closed.
        deadline = time.monotonic() + 5
        while len(clients[0].client_list(_type="normal")) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(clients[0].client_list(_type="normal")) == 1


@pytest.mark.accept
def test_loading_is_waited_for_without_a_restart(tmp_path: Path) -> None:
    folder, port = tmp_path / "redis", free_port()
    url = f"redis://:{PASSWORD}@127.0.0.1:{port}"
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, url) as server:
        with redis_server(
            folder, "--port", str(port), *ARGUMENTS, client=redis.Redis(port=port, password=PASSWORD)
        ) as process:
            fill(url)
            with redis.Redis(port=port, password=PASSWORD) as client:
                fill_for_loading(client)
            assert server.lookup(**LOOKUP).status_code == 200
            process.kill()
        said = set()
        with loading(binary(), folder, port):
            deadline = time.monotonic() + 20
            while (answer := server.lookup(**LOOKUP)).status_code != 200 and time.monotonic() < deadline:
                said.add((answer.json()["found"].partition(" (")[0], answer.headers["retry-after"]))
                if "loading" in answer.json()["found"]:
                    ready = server.http.get("/readyz")
                    assert ready.status_code == 200 or ready.headers["retry-after"] == "1"
            assert answer.json()["results"][1]["values"] == [7]
            assert _push(server, 9).json() == {"rows": 1, "written": 1}
    assert said - {("does not answer", "1")} == {("was started and is still loading its rows", "1")}
