"""Every way to a Redis that a URL can name, for what writes and for what serves."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from isthmus.features.errors import DependencyError
from isthmus.features.online.plan import LookupPlan
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import Int64
from isthmus.serving.limits import Limits
from isthmus.serving.redis.node import RedisNode
from isthmus.serving.redis.store import Store
from tests.servers import free_port, redis_server
from tests.serving.support import CONTRACT, NOW, fill
from tests.tls import Certificate, certificate, tls_proxy, tls_server

PASSWORD = "p@ss/w:rd,#?%"  # noqa: S105
QUOTED = quote(PASSWORD, safe="")
PLAN = LookupPlan(CONTRACT, ["punctuality"])


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A server with a password and another user, at a Unix socket and a port."""
    folder = tmp_path_factory.mktemp("r")
    port = free_port()
    arguments = [
        "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(folder / "a b.sock"), "--requirepass", PASSWORD,
        "--user", "feeder", "on", f">{PASSWORD}", "~*", "+@all",
        "--user", "reader", "on", ">other", "~flights:*", "+hmget",
    ]  # fmt: skip
    with redis_server(folder, *arguments, client=redis.Redis(port=port, password=PASSWORD)):
        yield folder / "a b.sock", port


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("certificate"))


def _read_back(url: str, write: str = "") -> None:
    """Writes through one client, reads through the other."""
    fill(write or url)

    async def read() -> list[int | None]:
        store = Store(url, Limits())
        try:
            await store.ping(CONTRACT)
            answer = await store.read(PLAN, {"carrier": ["UA", "B6", "nobody"]}, 3, NOW)
            return answer["punctuality"].columns["flights"].tolist(Int64)
        finally:
            await store.close()

    assert asyncio.run(read()) == [2**60 + 1, 7, None]


def _refused(url: str, found: str = "") -> None:
    async def ping() -> None:
        store = Store(url, Limits())
        try:
            await store.ping(CONTRACT)
        finally:
            await store.close()

    for attempt in (lambda: connect(url), lambda: asyncio.run(ping())):
        with pytest.raises(DependencyError) as caught:
            attempt()
        for secret in ("wrong", PASSWORD, QUOTED):
            assert secret not in str(caught.value)
        assert found in caught.value.found
        assert not found or not caught.value.passes


def test_password_user_and_socket(socket: tuple[Path, int]) -> None:
    path, port = quote(str(socket[0])), socket[1]
    for url in (
        f"redis://:{QUOTED}@127.0.0.1:{port}",
        f"redis://feeder:{QUOTED}@127.0.0.1:{port}/0",
        f"redis://localhost:{port}?username=feeder&password={QUOTED}",
        f"unix://:{QUOTED}@{path}",
        f"unix://feeder:{QUOTED}@{path}?db=1",
    ):
        _read_back(url)


def test_a_reader_needs_no_more_than_hmget(socket: tuple[Path, int]) -> None:
    place = f"127.0.0.1:{socket[1]}"
    _read_back(f"redis://reader:other@{place}", write=f"redis://:{QUOTED}@{place}")


def test_wrong_credentials(socket: tuple[Path, int]) -> None:
    path, port = quote(str(socket[0])), socket[1]
    for url in (
        f"redis://127.0.0.1:{port}", f"redis://:wrong@127.0.0.1:{port}", f"redis://feeder:wrong@127.0.0.1:{port}",
        f"redis://nobody:{QUOTED}@127.0.0.1:{port}", f"unix://:wrong@{path}", f"unix://{path}.other",
    ):  # fmt: skip
        _refused(url)


@pytest.fixture(scope="module", params=["behind a proxy", *(["of its own"] if tls_server() else [])])
def secured(
    request: pytest.FixtureRequest, own: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port of a Redis with TLS."""
    folder, port, plain = tmp_path_factory.mktemp("tls"), free_port(), free_port()
    arguments = ["--port", str(plain), "--bind", "127.0.0.1", "--requirepass", PASSWORD]
    if request.param == "of its own":
        arguments += [
            "--tls-port", str(port), "--tls-cert-file", str(own.certificate), "--tls-key-file", str(own.key),
            "--tls-ca-cert-file", str(own.certificate), "--tls-auth-clients", "no",
        ]  # fmt: skip
        with redis_server(
            folder, *arguments, client=redis.Redis(port=plain, password=PASSWORD), executable=tls_server()
        ):
            yield port
        return
    with (
        redis_server(folder, *arguments, client=redis.Redis(port=plain, password=PASSWORD)),
        tls_proxy(own, plain) as ended,
    ):
        yield ended


def test_tls(secured: int, own: Certificate, tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost"):
        _read_back(f"rediss://:{QUOTED}@{host}:{secured}?ssl_ca_certs={quote(str(own.certificate))}")
    _read_back(f"rediss://:{QUOTED}@127.0.0.1:{secured}?ssl_cert_reqs=none&ssl_check_hostname=false")
    # Nobody vouches for the certificate; another one does; no TLS.
    untrusted = "shows a certificate that is not trusted ("
    _refused(f"rediss://:{QUOTED}@127.0.0.1:{secured}", untrusted)
    other = quote(str(certificate(tmp_path).certificate))
    _refused(f"rediss://:{QUOTED}@127.0.0.1:{secured}?ssl_ca_certs={other}", untrusted)
    _refused(f"rediss://:{QUOTED}@127.1:{secured}?ssl_ca_certs={quote(str(own.certificate))}", untrusted)
    _refused(f"redis://:{QUOTED}@127.0.0.1:{secured}")
    _refused(f"rediss://:{QUOTED}@127.0.0.1:{secured}?ssl_ca_certs=/nowhere.pem")


async def _cancel_one_of_many(url: str) -> None:
    node = RedisNode(url)
    try:
        await node.ping(CONTRACT.project)
        wire = node._wires[False]
        for number in range(200):
            name = b"n%d" % number
            kept = [asyncio.create_task(node.ask([(b"ECHO", name + b"-%d" % n)])) for n in range(8)]
            gone = asyncio.create_task(node.ask([(b"ECHO", b"nobody reads this")]))
            await asyncio.sleep(0)
            gone.cancel()
            assert await asyncio.gather(*kept) == [[name + b"-%d" % n] for n in range(8)]
        assert node._wires[False] is wire
        assert not wire.left
    finally:
        await node.close()


def test_a_canceled_request_takes_nothing_from_the_others_on_its_connection(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        asyncio.run(_cancel_one_of_many(server.url))
