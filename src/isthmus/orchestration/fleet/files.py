"""`fleet`: writes a folder for Kubernetes and Docker, from the templates in `templates/`."""

import json
import math
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from importlib import resources
from pathlib import Path

import msgspec

from isthmus.features.errors import DataError, extra
from isthmus.features.files import write_atomically
from isthmus.orchestration.fleet.values import values
from isthmus.orchestration.project import Project

_MONITORING = (
    ("monitoring/alerts.yaml", "prometheus/alerts.yaml"),
    ("monitoring/dashboard.json", "grafana/isthmus.json"),
)
"""Files that are copied from the package of the server."""

NOTE = "fleet.json"
"""The names of the files that were written, with their checksums: a file that was edited since is not replaced."""


def fleet(project: Project, out: Path) -> list[str]:
    """Writes the folder, and returns the names of its files.

    Files of an earlier call are replaced, foreign files in the folder stay. The same project in the same environment
    produces the same bytes.

    Raises:
        ConfigurationError: the settings work on this machine alone; every problem is named.
        DataError: a file that would be replaced is foreign, or was edited.
        DependencyError: PyYAML or Jinja is not installed.
    """
    content = files(project)
    _write(out, content)
    return sorted(content)


def files(project: Project) -> dict[str, bytes]:
    """File name to content.

    A manifest is parsed and written again: comments and layout of its template do not show. A template that comes out
    empty is no file.

    Raises:
        ConfigurationError: the settings work on this machine alone; every problem is named.
        DependencyError: PyYAML or Jinja is not installed.
    """
    with extra("orchestration"):
        import jinja2
        import yaml

    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        """Without aliases, although the same labels occur in many places."""

        def ignore_aliases(self, _data: object) -> bool:
            return True

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - not HTML: free text goes through `quoted`
    )
    templates.filters["quoted"] = partial(yaml.safe_dump, default_style='"', width=math.inf)
    content, context = {}, values(project)
    for name in templates.list_templates():
        text = templates.get_template(name).render(context)
        if name.endswith(".yaml") and text.strip():
            text = yaml.dump(yaml.safe_load(text), Dumper=Plain, sort_keys=False, width=1000)
        if text.strip():
            content[name] = text.encode()
    return content | {name: (resources.files("isthmus.serving") / file).read_bytes() for name, file in _MONITORING}


def _write(out: Path, content: Mapping[str, bytes]) -> None:
    """Writes the files, and removes those of an earlier call that are not part of the content."""
    before = _written(out)
    sums = {name: sha256(data).hexdigest() for name, data in content.items()}
    changed = [
        name for name in sorted({*sums, *before}) if _sum(out / name) not in (None, before.get(name), sums.get(name))
    ]
    if changed:
        raise DataError(
            str(out), f"{', '.join(changed)} would be replaced, and this command did not write what is there",
            expected="a new folder, or one that this command wrote", remedy="write to another folder, or move them",
        )  # fmt: skip
    for name in sorted({*before} - {*sums}):
        (out / name).unlink(missing_ok=True)
    for name, data in content.items():
        write_atomically(out / name, data)
    # Last: the files of a call that was killed are the same as those of the next call, and need no entry.
    write_atomically(out / NOTE, json.dumps({"files": sums}, indent=1, sort_keys=True).encode() + b"\n")


def _written(out: Path) -> dict[str, str]:
    """File name to checksum, as the last call left them."""
    try:
        note = msgspec.json.decode((out / NOTE).read_bytes(), type=dict[str, dict[str, str]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(str(out / NOTE), f"cannot be read ({error})", expected="what `isthmus fleet` wrote") from error
    # Whatever the note says, files outside the folder are not ours.
    return {
        name: checksum
        for name, checksum in note.get("files", {}).items()
        if not Path(name).is_absolute() and ".." not in Path(name).parts
    }


def _sum(path: Path) -> str | None:
    """SHA-256 of a file; None if there is none, and "" if a link or folder is in its place."""
    if path.is_symlink() or path.is_dir():
        return ""
    return sha256(path.read_bytes()).hexdigest() if path.exists() else None
