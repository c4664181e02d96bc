"""Open a project and run its steps from Python: in tests, notebooks and scripts."""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.orchestration.apply.apply import apply
    from isthmus.orchestration.project import Project
    from isthmus.orchestration.tables.build import build
    from isthmus.orchestration.tables.materialize import materialize
    from isthmus.orchestration.verification.verify import verify
    from isthmus.transforms.engine import session

__all__ = [
    "Project",
    "apply",
    "build",
    "materialize",
    "session",
    "verify",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.orchestration.apply.apply": "apply",
            "isthmus.orchestration.project": "Project",
            "isthmus.orchestration.tables.build": "build",
            "isthmus.orchestration.tables.materialize": "materialize",
            "isthmus.orchestration.verification.verify": "verify",
            "isthmus.transforms.engine": "session",
        },
    )
