"""Explain why definitions fail or an argument does not fit. Suggest the name or line that the user meant."""

import builtins
import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import timedelta
from numbers import Integral, Real
from types import ModuleType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from isthmus.features.errors import ConfigurationError, Problem, did_you_mean, one_of

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENT = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"([\w.]+)\(\) missing \d+ required [\w-]+ arguments?: (.+)")
_POSITIONAL = re.compile(r"([\w.]+)\(\) takes .*positional arguments? ")
_IMPORT = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_PLAIN = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", NoneType: "None"}
_LINES = {"ttl": "write ttl=timedelta(days=30), for example, or ttl=None for values that never expire"}


def explain_arguments(function: F, name: str = "") -> F:
    """Wrap a function or constructor of the declarations, so that a wrong call gets a helpful error.

    A call that does not fit the signature raises ConfigurationError with a suggestion instead of TypeError. `name` is
    the function's name in that error, by default its own.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                known = {key: value for key, value in signature.parameters.items() if key != "self"}
                found, expected = _misfit(str(error), known) or (str(error), "")
                missing = [line for key, line in _LINES.items() if "without" in found and repr(key) in found]
                raise ConfigurationError(
                    "definitions", [Problem(name or function.__name__, found, expected, *missing)]
                ) from error
            raise

    return call  # type: ignore[return-value]


def type_problems(declared: object, where: str, skipped_fields: Sequence[str] = ()) -> list[Problem]:
    """Compare the values of a dataclass instance with its type hints; return a problem for each wrong value.

    `where` is the prefix of the place in each problem. Fields in `skipped_fields` are not checked.
    """
    return [
        Problem(f"{where}{name}", _display(value), _type_name(kind) + _line(name, kind, value))
        for name, kind in get_type_hints(type(declared)).items()
        if name not in skipped_fields and not _is_a(value := getattr(declared, name), kind)
    ]


def _is_a(value: object, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_a(value, each) for each in arguments)
    if origin in (Sequence, tuple):
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_is_a(v, arguments[0]) for v in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    kind = origin or kind
    return not isinstance(kind, type) or isinstance(value, kind)


def _type_name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_type_name, arguments))
    if origin in (Sequence, tuple):
        return f"a list, each item {_type_name(arguments[0])}"
    name = getattr(kind, "__name__", str(kind))
    return _PLAIN.get(kind) or ("a dict" if origin is Mapping else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def _display(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_display, value))}]"
    return f"{type(value).__name__} {value.name!r}" if is_dataclass(value) and hasattr(value, "name") else repr(value)


def _line(name: str, kind: Any, value: Any) -> str:
    """Return the line of code that the user probably meant; "" if there is no likely one."""
    items = value if isinstance(value, list | tuple) else [value]
    for each in get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]:
        origin, arguments = get_origin(each), get_args(each)
        if each is timedelta and isinstance(value, Real) and not isinstance(value, bool):
            return f": {name}=timedelta(days={value})"
        if origin is Mapping and items and all(isinstance(item, str) for item in items):
            content = "String" if getattr(arguments[1], "__name__", "") == "DataType" else "..."
            return f": {name}={{{', '.join(f'{item!r}: {content}' for item in items)}}}"
        if origin is Sequence and items and not isinstance(value, list | tuple) and _is_a(value, arguments[0]):
            return f": {name}=[{getattr(value, 'name', repr(value))}]"
        if (
            origin is Sequence
            and arguments[0] not in _PLAIN
            and items
            and all(isinstance(item, str) and item.isidentifier() for item in items)
        ):
            return f": {name}=[{', '.join(items)}], without quotes"
    return ""


def _misfit(text: str, known: Mapping[str, inspect.Parameter]) -> tuple[str, str] | None:
    """Explain why a call does not fit, and what would, from Python's message; return None for other messages."""
    # `*args` have no default either.
    needed = sorted(key for key, each in known.items() if each.default is each.empty and "*" not in str(each))
    if wrong := _ARGUMENT.match(text):
        return f"takes no argument {wrong[2]!r}{did_you_mean(wrong[2], known)}", one_of(known)
    if wrong := _MISSING.match(text):
        return f"is called without {wrong[2]}", f"{', '.join(needed)} at least"
    if _POSITIONAL.match(text):
        return "takes named arguments", ", ".join(f"{key}=..." for key in needed or known)
    return None


def explain_error(error: BaseException) -> tuple[str, str]:
    text = str(error).rstrip(".")
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = frames[-1].f_globals if frames else {}
    known = _parameters(called := text.partition("(")[0], names) if isinstance(error, TypeError) else {}
    if known and (wrong := _misfit(text, known)):
        return f"{called.removesuffix('.__init__')} {wrong[0]}", wrong[1]
    near = ""
    if isinstance(error, NameError) and error.name:
        near = did_you_mean(error.name, {*names, *dir(builtins)})
    elif isinstance(error, AttributeError) and error.name:
        near = did_you_mean(error.name, dir(error.obj))
    elif isinstance(error, ImportError) and (name := _IMPORT.match(text)) and name[2] in sys.modules:
        near = did_you_mean(name[1], dir(sys.modules[name[2]]))
    return f"fails with {type(error).__name__}: {text}{near}", ""


def _parameters(name: str, names: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    first, *rest = name.split(".")
    # `vars`, not `getattr`: some modules import their attributes on access.
    for known in (names, *(vars(module) for module in names.values() if isinstance(module, ModuleType))):
        function = known.get(first)
        for part in rest:
            function = getattr(function, part, None)
        if inspect.isfunction(function) and function.__qualname__ == name:
            parameters = inspect.signature(function).parameters
            return {known: parameter for known, parameter in parameters.items() if known != "self"}
    return {}
