"""Readiness probe of a server's pod, with an API key. Runs as `python -c`, so it uses the standard library only."""

import os
import socket
import sys

_HEAD = "GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\r\n"


def ready() -> bool:
    """Ask the server on port `PROBE_PORT` for `/readyz`, with the API key `PROBE_KEY`. Return True if it answers 200.

    Raises OSError, which also means not ready, if it cannot connect or gets no answer within 2 seconds.
    """
    with socket.create_connection(("127.0.0.1", int(os.environ["PROBE_PORT"])), 2) as server:
        server.settimeout(2)
        server.sendall(_HEAD.format(os.environ["PROBE_KEY"]).encode())
        return server.recv(12) == b"HTTP/1.1 200"


if __name__ == "__main__":
    sys.exit(not ready())
