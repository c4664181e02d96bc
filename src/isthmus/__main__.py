"""`python -m isthmus`, for launchers of several processes."""

from isthmus.orchestration.cli.cli import main

main()
