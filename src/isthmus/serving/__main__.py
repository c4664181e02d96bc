"""Run a server: `python -m isthmus.serving [--settings-fd N] [--parent PID]`.

It reads its settings from the file descriptor N, or else from `ISTHMUS_SERVER`. It ends when the process PID ends.
"""

import getopt  # argparse would take 1 % of the startup time
import sys

from isthmus.serving.http.server import main

if __name__ == "__main__":
    options = dict(getopt.getopt(sys.argv[1:], "", ["settings-fd=", "parent="])[0])
    settings, parent = options.get("--settings-fd"), options.get("--parent")
    sys.exit(main(None if settings is None else int(settings), None if parent is None else int(parent)))
