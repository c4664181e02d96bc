"""A server of files, as anybody has one."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        pass


def _passing(api: str) -> type[SimpleHTTPRequestHandler]:
    class Passing(_Quiet):
        def do_GET(self) -> None:
            if not self.path.startswith("/snapshots/"):
                super().do_GET()
                return
            known = {"if-none-match": self.headers.get("if-none-match", ""), "accept-encoding": "identity"}
            answer = httpx.get(f"{api}{self.path}", headers=known)
            self.send_response(answer.status_code)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

    return Passing


@contextmanager
def served(folder: Path, api: str | None = None) -> Iterator[str]:
    """The address of a server of a folder, which passes on to an API what begins with /snapshots."""
    handler = functools.partial(_Quiet if api is None else _passing(api), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
