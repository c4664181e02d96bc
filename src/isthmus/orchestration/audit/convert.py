"""`isthmus init --from-feast`: a project with the entities, views and services of a Feast repository."""

from pathlib import Path
from tempfile import TemporaryDirectory

from isthmus.features.feast.existing.convert import FeastDefinitions
from isthmus.features.feast.existing.repository import Repository
from isthmus.orchestration.scaffold import Scaffold, init

_README = """\
# {project}

The features of the Feast project {project}, read from the same files and tables.

```sh
isthmus apply && isthmus build && isthmus materialize
isthmus verify --all
isthmus serve                                # http://127.0.0.1:6570/docs
```
"""


def init_from_feast(folder: Path, repository: Path) -> tuple[Scaffold, list[str]]:
    """Create a project in `folder`. Return its files, and a note for each declaration without an equivalent.

    Raise ConfigurationError or DependencyError if the repository cannot be read; then nothing is written.
    """
    with TemporaryDirectory(prefix="isthmus-init-") as scratch:
        opened = Repository.open(repository, Path(scratch))
        written = FeastDefinitions(opened)
        files = {"definitions.py": written.text(), "README.md": _README.format(project=opened.project)}
        return init(folder, "empty", files), written.left_out
