"""`python -m isthmus.serving`: a server with the settings of the environment."""

import sys

from isthmus.serving.http.server import main

if __name__ == "__main__":
    sys.exit(main())
