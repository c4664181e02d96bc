"""The exceptions Isthmus raises.

IsthmusError
├── ConfigurationError     exit 2   isthmus.toml or the definitions are wrong: every problem at once
├── DataError              exit 1   data does not hold what was declared; nothing was written
├── ContractMismatch       exit 1   rows, tables or packages made under another contract
├── GateFailed             exit 1   a verdict, a parity check or a budget did not pass
├── PackageError           exit 1   a model package is damaged, altered or incomplete
├── RequestError           exit 2   a lookup or prediction asks for what does not exist
├── DependencyError        exit 3   Redis, Java, an engine or an optional library is not available
└── Stopped                exit 130 or 143   SIGINT or SIGTERM; what was done so far is kept
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LONGEST = 600
"""Characters of each part of a message about what a stranger wrote."""


class IsthmusError(Exception):
    """Base of every error a user is meant to read: one sentence with the place, the finding and the remedy.

    Attributes:
        where: the file, key, view, table or request the error is about.
        found: what was met there.
        expected: what would have been accepted; may be empty.
        remedy: what to do next; may be empty.
    """

    exit_code = 1

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "") -> None:
        self.where, self.found, self.expected, self.remedy = where, found, expected, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        sentence = f"{self.where}: {self.found}"
        if self.expected:
            sentence += f"; expected {self.expected}"
        if self.remedy:
            sentence += f". {self.remedy[0].upper()}{self.remedy[1:]}"
        return sentence

    def as_dict(self) -> dict[str, object]:
        """The error as plain data, for `--json` and for an API answer."""
        return {
            "error": type(self).__name__,
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration: where it stands, what was found, what would be accepted."""

    where: str
    found: str
    expected: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.found}" + (f"; expected {self.expected}" if self.expected else "")


class ConfigurationError(IsthmusError):
    """Every problem of a configuration or of a set of definitions, reported together."""

    exit_code = 2

    def __init__(self, where: str, problems: Sequence[Problem], *, remedy: str = "") -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            found = str(self.problems[0])
        else:
            found = f"{len(self.problems)} problems" + "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(where, found, remedy=remedy)

    def __str__(self) -> str:
        if len(self.problems) > 1 and self.remedy:
            return f"{self.where}: {self.found}\n{self.remedy[0].upper()}{self.remedy[1:]}"
        return super().__str__()

    def as_dict(self) -> dict[str, object]:
        """The error as plain data with one entry per problem."""
        problems = [{"where": p.where, "found": p.found, "expected": p.expected} for p in self.problems]
        return {**super().as_dict(), "problems": problems}


class DataError(IsthmusError):
    """Data that does not hold what was declared. Nothing was written."""


class ContractMismatch(IsthmusError):
    """Rows, tables or packages that were made under another contract than the one in use."""


class GateFailed(IsthmusError):
    """A verdict, a parity check or a budget that did not pass."""


class PackageError(IsthmusError):
    """A model package that is damaged, altered or incomplete.

    Whatever stands in a package may stand in the message: a terminal is told of it, at no great length, and not obeyed.
    """

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "") -> None:
        super().__init__(_shown(where), _shown(found), expected=_shown(expected), remedy=remedy)


def _shown(text: str) -> str:
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


class RequestError(IsthmusError):
    """A lookup or a prediction that asks for something that does not exist or has another type."""

    exit_code = 2


class DependencyError(IsthmusError):
    """Something outside this process is not available: Redis, Java, an engine, an optional library.

    Attributes:
        passes: whether waiting may be enough; if not, somebody has to do what `remedy` says.
    """

    exit_code = 3

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "", passes: bool = True) -> None:
        super().__init__(where, found, expected=expected, remedy=remedy)
        self.passes = passes


class Stopped(IsthmusError):
    """Work that a signal ended in order: the same call goes on with it. The exit code is a shell's for the signal."""

    def __init__(self, where: str, found: str, number: int, *, remedy: str = "") -> None:
        super().__init__(where, found, remedy=remedy)
        self.exit_code = 128 + number
