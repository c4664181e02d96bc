"""The exceptions Isthmus raises.

IsthmusError
├── ConfigurationError     exit 2   isthmus.toml or the definitions are wrong: every problem at once
├── DataError              exit 1   data does not match its declaration; nothing was written
├── ContractMismatch       exit 1   rows, tables or packages of another contract
├── GateFailed             exit 1   a verdict, a parity check or a budget did not pass
│   └── ParityFailed       exit 1   a model file answers differently from its student
├── PackageError           exit 1   a model package is damaged, altered or incomplete
├── RequestError           exit 2   a lookup or prediction asks for what does not exist
├── DependencyError        exit 3   Redis, Java, an engine or an optional library is not available
│   └── LostRowsError      exit 3   Redis no longer has rows that were materialized
└── Stopped                exit 130 or 143   SIGINT or SIGTERM; finished work stays
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

_LONGEST = 600
"""Characters of each part of a message about a package."""


class IsthmusError(Exception):
    """Base of every error a user is meant to read: a sentence with the place, the problem and the remedy.

    Attributes:
        where: the file, key, view, table or request the error is about.
        found: what is wrong there.
        expected: what would have been accepted; may be empty.
        remedy: what to do next; may be empty.
    """

    exit_code = 1

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "") -> None:
        self.where, self.found, self.expected, self.remedy = where, found, expected, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        return _sentence(self)

    def as_dict(self) -> dict[str, object]:
        """The error as plain data, for `--json` and for an API answer."""
        parts = {name: getattr(self, name) for name in ("where", "found", "expected", "remedy")}
        return {"error": type(self).__name__, **parts}


def _sentence(error: "IsthmusError | Problem") -> str:
    sentence = f"{error.where}: {error.found}"
    if error.expected:
        sentence += f"; expected {error.expected}"
    if error.remedy:
        sentence += f". {error.remedy[0].upper()}{error.remedy[1:]}"
    return sentence


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a configuration, with the attributes of `IsthmusError`."""

    where: str
    found: str
    expected: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return _sentence(self)


class ConfigurationError(IsthmusError):
    """Every problem of a configuration or of a set of definitions, reported together."""

    exit_code = 2

    def __init__(self, where: str, problems: Sequence[Problem], *, remedy: str = "") -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            remedy = remedy or self.problems[0].remedy
            text = str(replace(self.problems[0], remedy=""))
        else:
            text = f"{len(self.problems)} problems" + "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(where, text, remedy=remedy)

    def __str__(self) -> str:
        if len(self.problems) > 1 and self.remedy:
            return f"{self.where}: {self.found}\n{self.remedy[0].upper()}{self.remedy[1:]}"
        return super().__str__()

    def as_dict(self) -> dict[str, object]:
        """The error as plain data with an entry per problem."""
        return {**super().as_dict(), "problems": [asdict(problem) for problem in self.problems]}


class DataError(IsthmusError):
    """Data that does not match its declaration. Nothing was written."""


class DamagedRowError(DataError):
    """A row of the online store that is not what was written."""


class ContractMismatch(IsthmusError):
    """Rows, tables or packages of another contract than the current one."""


class GateFailed(IsthmusError):
    """A verdict, a parity check or a budget that did not pass."""


class ParityFailed(GateFailed):
    """A model file answers differently from its student."""


class PackageError(IsthmusError):
    """A model package that is damaged, altered or incomplete.

    Its parts may quote any content of a package, so they are shortened, without control characters for the terminal.
    """

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "") -> None:
        super().__init__(_shown(where), _shown(found), expected=_shown(expected), remedy=remedy)


def _shown(text: str) -> str:
    return harmless(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


class RequestError(IsthmusError):
    """A lookup or a prediction that asks for what does not exist or has another type.

    Attributes:
        example: the body of a request that is right; None where none is known.
    """

    exit_code = 2
    example: Mapping[str, object] | None = None

    def as_dict(self) -> dict[str, object]:
        """The error as plain data, with the example, if there is one."""
        return {**super().as_dict(), **({} if self.example is None else {"example": self.example})}


class DependencyError(IsthmusError):
    """Something outside this process is not available: Redis, Java, an engine, an optional library.

    Attributes:
        passes: whether waiting may help; if not, only the remedy does.
    """

    exit_code = 3

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "", passes: bool = True) -> None:
        super().__init__(where, found, expected=expected, remedy=remedy)
        self.passes = passes


class LostRowsError(DependencyError):
    """The online store no longer has rows that were materialized."""


class Stopped(IsthmusError):
    """Work that a signal ended; the same call resumes it. The exit code is the shell's for the signal."""

    def __init__(self, where: str, found: str, number: int, *, remedy: str = "") -> None:
        super().__init__(where, found, remedy=remedy)
        self.exit_code = 128 + number


def harmless(text: str) -> str:
    """The text without control codes, for a terminal: it may quote a stranger's file."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


_REFUSAL = re.compile(r"<Error>\s*<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)
_NESTED = re.compile(r"\s*(\x1b\[[0-9;]*m)?↳(\x1b\[[0-9;]*m)?\s*")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if it has none.

    Of a refusal by object storage it is the code and the message; of errors within errors, the first and the last.
    """
    text = str(error).strip()
    if refusal := _REFUSAL.search(text):
        return ": ".join(refusal.groups())
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and _NESTED.match(lines[1]):
        return f"{lines[0]}: {_NESTED.sub('', lines[-1])}"
    return lines[0] if lines else type(error).__name__


def nearest(name: object, known: Iterable[object]) -> str:
    """For a message about an unknown name, which may be no text, the known name that it resembles; or nothing."""
    import difflib

    close = difflib.get_close_matches(str(name), map(str, known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def one_of(names: Iterable[str]) -> str:
    """The accepted names, for a message."""
    known = sorted(names)
    if len(known) > 1:
        return f"one of {', '.join(known)}"
    return known[0] if known else "none: nothing is declared"


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Wraps the imports of the libraries that an extra of Isthmus installs.

    Raises:
        DependencyError: an import failed; the remedy is to install the extra.
    """
    try:
        yield
    except ImportError as error:
        raise _not_installed(name, error) from error


_EXTRAS = {
    "dagster": "orchestration",
    "deltalake": "offline",
    "duckdb": "offline",
    "feast": "orchestration",
    "pysail": "transforms",
    "pyspark": "transforms",
}
"""Libraries that whole rooms import at the top, where `extra` cannot wrap each import, to the extra that has them."""


def missing_extra(error: BaseException) -> DependencyError | None:
    """The extra whose library an import did not find; None for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in _EXTRAS:
        return None
    return _not_installed(_EXTRAS[name], error)


def _not_installed(name: str, error: BaseException) -> DependencyError:
    return DependencyError(name, f"cannot be imported ({error})", remedy=f"install it: pip install 'isthmus[{name}]'")
