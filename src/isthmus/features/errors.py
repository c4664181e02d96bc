"""The exceptions that Isthmus raises.

IsthmusError
├── ConfigurationError     exit 2   isthmus.toml or the definitions are wrong; lists every problem
├── DataError              exit 1   data do not match their declaration, or cannot be read or written
│   └── DamagedRowError    exit 1   a row of the online store is damaged
├── ContractMismatch       exit 1   rows, tables or packages belong to another contract
├── GateFailed             exit 1   a verdict, a parity check or a budget did not pass
│   └── ParityFailed       exit 1   a model file's outputs differ from its student's
├── PackageError           exit 1   a model package is damaged, altered or incomplete
├── RequestError           exit 2   a lookup or prediction asks for something that does not exist
├── DependencyError        exit 3   Redis, Java, an engine or an optional library is not available
│   ├── LostProcessError   exit 3   another process of a training ended or hangs
│   └── LostRowsError      exit 3   Redis no longer has rows that were materialized
└── Stopped                exit 130 or 143   SIGINT or SIGTERM; finished work is saved
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

_LONGEST = 600
"""The most characters of each part of a message about a package."""


class IsthmusError(Exception):
    """Base of every error for users. The message has the place, the problem, the expected value and the remedy.

    Attributes:
        where: file, key, view, table or request with the error.
        found: problem there.
        expected: accepted values; may be empty.
        remedy: next step for the user; may be empty.
    """

    exit_code = 1

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "") -> None:
        self.where, self.found, self.expected, self.remedy = where, found, expected, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        return _sentence(self)

    def as_dict(self) -> dict[str, object]:
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
    """One problem of a configuration, with the fields of `IsthmusError`."""

    where: str
    found: str
    expected: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return _sentence(self)


class ConfigurationError(IsthmusError):
    """The configuration or the definitions are wrong; `problems` lists every problem."""

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
        return {**super().as_dict(), "problems": [asdict(problem) for problem in self.problems]}


class DataError(IsthmusError):
    """Data do not match their declaration, or stored data cannot be read or written. What was stored is unchanged."""


class DamagedRowError(DataError):
    """A row of the online store is damaged."""


class ContractMismatch(IsthmusError):
    """Rows, tables or packages belong to another contract than the current one."""


class GateFailed(IsthmusError):
    """A verdict, a parity check or a budget did not pass."""


class ParityFailed(GateFailed):
    """A model file's outputs differ from its student's."""


class PackageError(IsthmusError):
    """A model package is damaged, altered or incomplete. The message shortens and escapes text quoted from it."""

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "") -> None:
        super().__init__(_shown(where), _shown(found), expected=_shown(expected), remedy=remedy)


def _shown(text: str) -> str:
    return escape_unprintable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


class RequestError(IsthmusError):
    """A lookup or prediction asks for something that does not exist or has the wrong type."""

    exit_code = 2
    example: Mapping[str, object] | None = None  # body of a valid request

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), **({} if self.example is None else {"example": self.example})}


class DependencyError(IsthmusError):
    """Redis, Java, an engine or an optional library is not available; `passes` is True if waiting may help."""

    exit_code = 3

    def __init__(self, where: str, found: str, *, expected: str = "", remedy: str = "", passes: bool = True) -> None:
        super().__init__(where, found, expected=expected, remedy=remedy)
        self.passes = passes


class LostProcessError(DependencyError):
    """Another process of the same training ended or hangs; the cause is its own error, if it has one."""


class LostRowsError(DependencyError):
    """The online store has lost rows that were materialized."""


class Stopped(IsthmusError):
    """A signal stopped the work; the same call resumes it. The exit code is the shell's for the signal."""

    def __init__(self, where: str, found: str, number: int, *, remedy: str = "") -> None:
        super().__init__(where, found, remedy=remedy)
        self.exit_code = 128 + number


def escape_unprintable(text: str) -> str:
    """Escape unprintable characters except line breaks, so that untrusted text cannot control the user's terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


_REFUSAL = re.compile(r"<Error>\s*<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)
_NESTED = re.compile(r"\s*(\x1b\[[0-9;]*m)?↳(\x1b\[[0-9;]*m)?\s*")


def mask_secrets(text: str) -> str:
    """Mask secrets in a text before showing it: users and passwords in URLs, and values of `token=` and `password=`."""
    return re.sub(r"(token|password)=[^;&'\"]*", r"\1=***", re.sub("//.*@", "//***@", text))


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    if refusal := _REFUSAL.search(text):
        return ": ".join(part.strip().partition("\n")[0] for part in refusal.groups())
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and _NESTED.match(lines[1]):
        return f"{lines[0]}: {_NESTED.sub('', lines[-1])}"
    return lines[0] if lines else type(error).__name__


def did_you_mean(name: object, known: Iterable[object]) -> str:
    import difflib

    close = difflib.get_close_matches(str(name), map(str, known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def one_of(names: Iterable[str]) -> str:
    known = sorted(names)
    if len(known) > 1:
        return f"one of {', '.join(known)}"
    return known[0] if known else "none, because nothing is declared"


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn an ImportError in the `with` block into a DependencyError that says how to install a missing library.

    `name` is the optional dependency group of the package, as in `pip install isthmus[name]`.
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
"""Libraries imported at module level, where `extra` cannot wrap the import, to the extra that installs them."""


def missing_extra(error: BaseException) -> DependencyError | None:
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in _EXTRAS:
        return None
    return _not_installed(_EXTRAS[name], error)


def _not_installed(name: str, error: BaseException) -> DependencyError:
    return DependencyError(name, f"cannot be imported ({error})", remedy=f"install it: pip install 'isthmus[{name}]'")
