"""A Redis of its own for each module that asks for one."""

from collections.abc import Iterator

import pytest

from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.redis.pipeline import Client


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as embedded:
        yield embedded.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with connect(url) as connected:
        yield connected
