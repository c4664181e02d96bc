"""An Apache Spark Connect server in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SERVE = """
import sys
from isthmus.transforms import engine
url = engine._spark(2)
print(url, flush=True)
sys.stdin.read()
"""


@contextmanager
def connect_server() -> Iterator[str]:
    """The `sc://` URL of a server that ends with the block."""
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("sc://"), "the server did not start"
        try:
            yield url
        finally:
            process.communicate("")
