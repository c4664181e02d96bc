"""`python -m isthmus.serving`: a server with the settings of the environment, or of an open file."""

import argparse
import sys

from isthmus.serving.http.server import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m isthmus.serving")
    parser.add_argument("--settings-fd", type=int, help="an open file that has the settings; else ISTHMUS_SERVER has")
    parser.add_argument("--parent", type=int, help="the process with which the server ends")
    arguments = parser.parse_args()
    sys.exit(main(arguments.settings_fd, arguments.parent))
