"""A server of a project, in a process of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import serving
from tests.servers import free_port
from tests.serving.support import wait


@contextmanager
def served(project: Project, *, model: bool = False) -> Iterator[httpx.Client]:
    """Until it is ready, and has a model if there should be one."""
    port = free_port()
    with (
        (project.state / "server.log").open("wb") as log,
        serving(project, port=port, log=log),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):

        def ready() -> bool:
            try:
                answer = http.get("/readyz")
            except httpx.TransportError:
                return False
            return answer.json().get("model") is not None if model else answer.status_code == 200

        wait(ready, "the server", 60)
        yield http
