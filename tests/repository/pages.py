"""The pages of the documentation: their blocks of code, and a terminal that runs them."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.servers import free_port

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(file.relative_to(ROOT))
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md"))
    if file.name != "log.md"  # what was, not what is
)
_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
_FILE = re.compile(r"# (\S+\.(?:toml|yaml|py))\n")


@dataclass(frozen=True)
class Block:
    """Of a page, by its first line there.

    Attributes:
        page: relative to the repository.
        line: where it stands.
        language: what the fence says.
        text: without the fence.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that its first line names, or nothing."""
        named = _FILE.match(self.text)
        return named[1] if named else ""

    @property
    def commands(self) -> Iterator[str]:
        """Of a shell, whole: over as many lines as it takes."""
        lines = self.text.splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith(("$ ", "    "))]
        command = ""
        for line in lines:
            command = command + line.removesuffix("\\") + ("" if line.endswith("\\") else "\n")
            if not line.endswith("\\") and _closed(command):
                if words(command):
                    yield command.strip()
                command = ""
        assert not command, f"{self}: {command}"


def words(command: str) -> list[str]:
    """Of a command, without its comment; `&&`, `|` and their like are words, too."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _closed(command: str) -> bool:
    try:
        words(command)
    except ValueError:
        return False
    return True


def blocks(page: str, *languages: str) -> list[Block]:
    """Of a page, in order; by default of every language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [
        Block(page, text.count("\n", 0, fence.start()) + 1, fence[2], textwrap.dedent(fence[3]))
        for fence in _FENCE.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def prose(page: str) -> str:
    """What is no block."""
    return _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


class Terminal:
    """Runs blocks as a reader would, in a folder: what names a file goes there, commands run, and a server stays up.

    Two things are left out: the installation, which `test_the_installation_works_as_written` runs, and the tests of a
    new project, which tests/orchestration/test_scaffold.py runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ISTHMUS_SERVER__PORT": str(self.port),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._server:
            self._server.terminate()
            self._server.wait(timeout=20)

    def run(self, block: Block) -> str:
        """What it prints."""
        if block.file:
            with (self.folder / block.file).open("a") as file:
                file.write(f"\n{block.text}")
            return ""
        if block.language == "python":
            return self._done([sys.executable, "-c", block.text], str(block))
        return "".join(self._command(command) for command in block.commands)

    def _command(self, command: str) -> str:
        match words(command):
            case ["pip", "install", *_] | ["python3", "-m", "venv", _] | [".", _] | ["python", "-m", "pytest"]:
                return ""
            case ["cd", place]:
                self.folder /= place
                return ""
            case ["isthmus", "serve"]:
                arguments = ["isthmus", "serve"]
                self._server = subprocess.Popen(
                    arguments, cwd=self.folder, env=self._environment, stderr=subprocess.DEVNULL
                )
                self._await()
                return ""
        command = command.replace(":6570/", f":{self.port}/").replace("curl -s ", "curl -s --fail-with-body ")
        return self._done(["bash", "-c", command], command)

    def _done(self, command: list[str], shown: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shown}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _await(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz"):
                    return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
