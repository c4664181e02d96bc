"""The API of a project whose last package is deployed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.verification.verify import verify
from tests.serving.support import free_port, wait


@contextmanager
def deployed(project: Project, log: Path) -> Iterator[httpx.Client]:
    """Verifies and deploys the package, as `isthmus verify --all-keys` and `isthmus deploy` do; a client of the API."""
    materialize(project)
    assert verify(project, all_keys=True).passed
    deploy(project)
    port = free_port()
    with (
        log.open("wb") as file,
        serving(project, port=port, log=file, private=True),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        wait(lambda: _ready(http), "the server")
        yield http


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/v2/health/ready").is_success
    except httpx.TransportError:
        return False
