"""Dagster's webserver, with a guard (`OwnPages`) against requests from other web sites, which could start runs.

Use these commands instead of Dagster's:

    python -m isthmus.orchestration.server.dagster [the options of dagster-webserver]
    python -m isthmus.orchestration.server.dagster dev [the options of dagster dev]
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import dagster._cli.dev
import dagster_webserver.app
import dagster_webserver.cli
from dagster_webserver.webserver import DagsterWebserver
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.serving.http.guard import error_response, require_own_page
from isthmus.serving.wire.errors import ForbiddenError

MODULE = "isthmus.orchestration.server.dagster"
HOSTS = "DAGSTER_ALLOWED_HOSTS"  # variable with more host names of this machine, separated by commas

_NAME_IT = (
    "open Dagster at localhost, or add the name to `[server] hosts` of isthmus.toml (with `isthmus dev`) "
    f"or to {HOSTS} (with your own webserver)"
)
_INSTEAD = "open Dagster in a separate tab"


class OwnPages:
    """Middleware that rejects requests from pages of other web sites. Programs and Dagster's pages are served."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._hosts = frozenset(filter(None, os.environ.get(HOSTS, "").split(",")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] in ("http", "websocket"):
                self._require(scope)
        except ForbiddenError as error:
            if scope["type"] == "http":
                await error_response(error, scope)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _require(self, scope: Scope) -> None:
        # People may follow links to pages, but not to GraphQL (perhaps behind a prefix): a GET can start runs.
        visits = "graphql" not in scope["path"]
        require_own_page(scope, self._hosts, host_remedy=_NAME_IT, site_remedy=_INSTEAD, visits=visits)
        # Over plain HTTP, browsers do not say which site a GET to another name than localhost comes from.
        known = any(name == b"sec-fetch-site" for name, _ in scope["headers"])
        if not visits and not known and scope.get("method") == "GET" and scope["query_string"]:
            raise ForbiddenError("request", "is a GraphQL query by GET", expected="POST", remedy="send it by POST")


class Webserver(DagsterWebserver[Any, Any]):
    def build_middleware(self) -> list[Middleware]:
        return [Middleware(OwnPages), *super().build_middleware()]


def main() -> None:
    # Dagster has no parameter for its webserver class, so replace it. `isthmus dev` checks that the guard works.
    app: Any = dagster_webserver.app
    cli: Any = dagster_webserver.cli
    dev: Any = dagster._cli.dev
    if sys.argv[1:2] != ["dev"]:
        app.DagsterWebserver = Webserver
        cli.main()
        return
    start = dev.open_ipc_subprocess

    def started(command: Sequence[str], **options: Any) -> Any:
        if list(command[1:3]) == ["-m", "dagster_webserver"]:
            command = [command[0], "-m", MODULE, *command[3:]]
        return start(command, **options)

    dev.open_ipc_subprocess = started
    dev.dev_command(sys.argv[2:])


if __name__ == "__main__":
    main()
