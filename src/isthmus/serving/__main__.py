"""`python -m isthmus.serving [--settings-fd N] [--parent PID]`: a server.

Its settings are those of the environment, or of an open file; it ends with a parent process, if it is told of one.
"""

import getopt  # argparse would take a hundredth of the time until a server is ready
import sys

from isthmus.serving.http.server import main

if __name__ == "__main__":
    options = dict(getopt.getopt(sys.argv[1:], "", ["settings-fd=", "parent="])[0])
    settings, parent = options.get("--settings-fd"), options.get("--parent")
    sys.exit(main(None if settings is None else int(settings), None if parent is None else int(parent)))
