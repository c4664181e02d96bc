from collections.abc import Iterator

import pytest

from isthmus.features.redis.embedded import EmbeddedRedis
from tests.serving.support import CONTRACT, Server, fill, make_package, serving, wait


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as embedded:
        fill(embedded.url)
        yield embedded.url


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Server]:
    """A server with a contract, rows and a model, which no test changes."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(folder / "package")
    with serving(folder, redis_url) as running:
        running.deploy(package)
        wait(lambda: running.http.get("/readyz").json().get("model") == "late", "the model")
        yield running
