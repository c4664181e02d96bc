"""Whether the server beside this process is ready: run as text by a readiness probe, with nothing but the interpreter.

`/readyz` asks for a key, which no probe over HTTP can take from a Secret. Importing anything of Isthmus would cost more
CPU than a hundred predictions, every few seconds.
"""

import os
import socket
import sys

_HEAD = "GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\r\n"


def ready() -> bool:
    """Whether lookups can be answered; an OSError is a no, too."""
    with socket.create_connection(("127.0.0.1", int(os.environ["PROBE_PORT"])), 2) as server:
        server.settimeout(2)
        server.sendall(_HEAD.format(os.environ["PROBE_KEY"]).encode())
        return server.recv(12) == b"HTTP/1.1 200"


if __name__ == "__main__":
    sys.exit(not ready())
