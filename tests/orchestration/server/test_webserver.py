"""Dagster's webserver, which answers its own pages and programs of this machine alone."""

from collections.abc import Iterator
from contextlib import nullcontext

import dagster as dg
import pytest
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import EmptyWorkspaceTarget
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from isthmus.orchestration.server.dagster import HOSTS, Webserver
from isthmus.serving.http.guard import require_own_page
from isthmus.serving.wire.errors import ForbiddenError

QUERY = {"query": "mutation { reloadWorkspace { __typename } }"}
EVIL = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
OWN = {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-origin"}
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
REBOUND = {"Host": "evil.example:3000", "Origin": "http://evil.example:3000", "Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    patch = pytest.MonkeyPatch()
    patch.setenv(HOSTS, "devbox,other")
    with (
        dg.instance_for_test(temp_dir=str(tmp_path_factory.mktemp("dagster"))) as instance,
        WorkspaceProcessContext(instance, EmptyWorkspaceTarget(), version="") as context,
    ):
        yield TestClient(Webserver(context).create_asgi_app(), "http://localhost:3000")
    patch.undo()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/graphql", {}, 200),
        ("POST", "/graphql", OWN, 200),
        ("POST", "/graphql", {"Host": "127.0.0.1:3000"}, 200),
        ("POST", "/graphql", {"Host": "devbox:3000"}, 200),
        ("GET", "/asset-groups", {}, 200),
        ("GET", "/asset-groups", LINK, 200),
        ("POST", "/graphql", EVIL, 403),
        ("POST", "/graphql", {"Origin": "http://evil.example"}, 403),
        ("POST", "/graphql", {"Origin": "null"}, 403),
        ("POST", "/graphql", {"Origin": ""}, 403),
        ("POST", "/graphql", {"Origin": "http://localhost:3001", "Sec-Fetch-Site": "same-site"}, 403),
        ("POST", "/graphql", REBOUND, 403),
        ("POST", "/graphql", LINK, 403),
        ("GET", "/graphql", {"Sec-Fetch-Site": "same-origin"}, 200),
        ("GET", "/graphql", {"Host": "devbox:3000"}, 403),
        ("GET", "/graphql", EVIL, 403),
        ("GET", "/graphql", LINK, 403),
        ("GET", "/graphql", REBOUND, 403),
        ("GET", "/asset-groups", {**LINK, "Sec-Fetch-Dest": "iframe"}, 403),
        ("GET", "/asset-groups", REBOUND, 403),
        ("GET", "/server_info", EVIL, 403),
    ],
)
def test_no_page_of_another_site_reaches_dagster(
    dagster: TestClient, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = dagster.request(method, path, params=QUERY, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 403:
        assert answer.json()["error"] == "ForbiddenError"
    elif path == "/graphql":
        assert answer.json()["data"]["reloadWorkspace"]["__typename"] == "Workspace"


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, REBOUND])
def test_no_page_of_another_site_opens_a_websocket(dagster: TestClient, headers: dict[str, str]) -> None:
    with pytest.raises(WebSocketDisconnect), dagster.websocket_connect("/graphql", ["graphql-ws"], headers=headers):
        pass


def test_its_own_pages_open_a_websocket(dagster: TestClient) -> None:
    # As Firefox says of a handshake.
    headers = {"Host": "localhost:3000", "Origin": "http://localhost:3000", "Sec-Fetch-Site": "cross-site"}
    with dagster.websocket_connect("/graphql", ["graphql-ws"], headers=headers) as socket:
        socket.send_json({"type": "connection_init"})
        assert socket.receive_json()["type"] == "connection_ack"


@pytest.mark.parametrize(
    ("address", "headers", "passes"),
    [
        ("192.0.2.1", {"host": "host.example:3000"}, True),
        ("192.0.2.1", {"host": "host.example:3000", "origin": "http://host.example:3000"}, True),
        ("192.0.2.1", {"host": "host.example:3000", "origin": "http://evil.example"}, False),
        ("127.0.0.1", {"host": "host.example:3000"}, False),
        ("::1", {"host": "host.example:3000"}, False),
        ("::ffff:127.0.0.1", {"host": "host.example:3000"}, False),
        ("/run/socket", {"host": "host.example:3000"}, False),
        ("::1", {"host": "[::1]:3000"}, True),
    ],
)
def test_a_name_is_checked_where_a_request_came_by_loopback(
    address: str, headers: dict[str, str], passes: bool
) -> None:
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/graphql", "server": (address, 3000), "headers": sent}
    with nullcontext() if passes else pytest.raises(ForbiddenError):
        require_own_page(scope, (), host_remedy="name it")
