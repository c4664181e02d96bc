"""A server whose model tests may replace."""

from collections.abc import Iterator

import pytest

from isthmus.serving.recorder.options import Recording
from tests.serving.support import CONTRACT, Server, make_package, serving, wait


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Server]:
    """A server of this module's own, whose model fails for an infinite number."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(folder / "package", picky=True)
    with serving(
        folder,
        redis_url,
        freshness_objective_seconds={"punctuality": 7200.0},
        record=Recording(),
        spool=str(folder / "spool"),
    ) as running:
        running.deploy(package)
        wait(lambda: running.http.get("/readyz").json().get("model") == "late", "the model")
        yield running
