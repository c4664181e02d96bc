"""`isthmus init`: create a project from an example."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.files import scratch_folder

Example = Literal["empty", "flights", "docsearch", "docwriter", "effects", "topics"]
EXAMPLES: tuple[Example, ...] = get_args(Example)

# Output folders: not copied, ignored by git.
_WRITTEN = (".isthmus", "__pycache__", ".pytest_cache", "data", "models", "site")
_FOLDERS = (Path(__file__).parent / "examples", Path(__file__).parents[3] / "examples")  # in a wheel, in the repository


@dataclass(frozen=True)
class Scaffold:
    folder: Path
    name: str
    example: str
    files: list[str]
    next: list[str]


def init(folder: Path, example: Example = "empty", replaced: Mapping[str, str] | None = None) -> Scaffold:
    """Create a project in `folder` as a copy of an example. Return its files and the commands to run next.

    With `replaced`, texts by file name, write only these files and the settings of the example.

    The name of the folder becomes the name of the project. The folder must be new, or empty except for hidden files,
    which stay. Raises a ConfigurationError and writes nothing if the folder is a file or has visible files, or if its
    name is not a valid project name.
    """
    root = folder.resolve()
    problems = []
    # Same rule as for `project.name` in isthmus.toml; the settings module is slow to import.
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", root.name):
        expected = "a name of lower-case letters, digits, _ and -, starting with a letter or digit"
        problems.append(Problem("name", repr(root.name), expected))
    if root.exists() and not root.is_dir():
        problems.append(Problem("folder", "is a file", "a new or an empty folder"))
    elif root.is_dir() and (entries := sorted(entry.name for entry in root.iterdir() if entry.name[0] != ".")):
        more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
        problems.append(Problem("folder", f"contains {', '.join(entries[:3])}{more}", "a new or an empty folder"))
    if problems:
        raise ConfigurationError(str(root), problems, remedy="nothing was written; choose another folder")
    source = next(examples for examples in _FOLDERS if examples.is_dir()) / example
    root.mkdir(parents=True, exist_ok=True)
    with scratch_folder(root, ".init") as scratch:
        fresh = scratch / root.name
        settings = fresh / "isthmus.toml"
        if replaced is None:
            shutil.copytree(source, fresh, ignore=shutil.ignore_patterns(*_WRITTEN, ".*", "*.pyc"))
        else:
            fresh.mkdir()
            shutil.copyfile(source / settings.name, settings)
        for name, text in (replaced or {}).items():
            (fresh / name).write_text(text, encoding="utf-8")
        settings.write_text(_renamed(settings.read_text(encoding="utf-8"), example, root.name), encoding="utf-8")
        (fresh / ".gitignore").write_text("".join(f"{name}/\n" for name in _WRITTEN), encoding="utf-8")
        files = sorted(str(file.relative_to(fresh)) for file in fresh.rglob("*") if file.is_file())
        # Move the settings last, because they turn the folder into a project.
        for entry in sorted(fresh.iterdir(), key=lambda entry: entry == settings):
            if not (root / entry.name).exists():
                entry.rename(root / entry.name)
    readme = (root / "README.md").read_text(encoding="utf-8")
    commands = readme.partition("```sh\n")[2].partition("```")[0].splitlines()
    return Scaffold(root, root.name, example, files, commands)


def _renamed(settings: str, example: str, name: str) -> str:
    old, new = f'name = "{example}"', f'name = "{name}"'
    return re.sub(
        rf"^{re.escape(old)}( *)",
        lambda match: new + " " * max(len(match[1]) + len(old) - len(new), bool(match[1])),
        settings,
        count=1,
        flags=re.MULTILINE,
    )
