"""Readiness probe of a server's pod, with an API key. Runs as `python -c`, so it uses the standard library only."""

import os
import socket
import sys

_HEAD = "GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\r\n"


def ready() -> bool:
    """Ask the server in this pod whether it can take requests: True if `/readyz` answers with status 200.

    Kubernetes runs this as the readiness probe. Reads the port from the environment variable `PROBE_PORT` and an API
    key from `PROBE_KEY`. Raise OSError, which also means not ready, if the server does not answer within 2 seconds.
    """
    with socket.create_connection(("127.0.0.1", int(os.environ["PROBE_PORT"])), 2) as server:
        server.settimeout(2)
        server.sendall(_HEAD.format(os.environ["PROBE_KEY"]).encode())
        return server.recv(12) == b"HTTP/1.1 200"


if __name__ == "__main__":
    sys.exit(not ready())
