"""Readiness probe of a server's pod. Its source is passed to `python -c`, so it uses the standard library only.

`/readyz` needs an API key, and an HTTP probe of Kubernetes cannot read one from a Secret. Importing Isthmus would cost
more CPU than a hundred predictions, every few seconds.
"""

import os
import socket
import sys

_HEAD = "GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\r\n"


def ready() -> bool:
    """Ask the server on port `PROBE_PORT` for `/readyz`, with the API key `PROBE_KEY`. Return True if it answers 200.

    An OSError, such as a timeout of 2 seconds, also means that it is not ready.
    """
    with socket.create_connection(("127.0.0.1", int(os.environ["PROBE_PORT"])), 2) as server:
        server.settimeout(2)
        server.sendall(_HEAD.format(os.environ["PROBE_KEY"]).encode())
        return server.recv(12) == b"HTTP/1.1 200"


if __name__ == "__main__":
    sys.exit(not ready())
