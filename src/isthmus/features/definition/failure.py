"""Why definitions do not run: Python's words, with the name that was probably meant."""

import builtins
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from isthmus.features.errors import nearest, one_of

_ARGUMENT = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"([\w.]+)\(\) missing \d+ required [\w-]+ arguments?: (.+)")
_IMPORT = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def reason(error: BaseException) -> tuple[str, str]:
    """What was found, and what was expected if that is known."""
    text = str(error).rstrip(".")
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = frames[-1].f_globals if frames else {}
    if (wrong := _ARGUMENT.match(text)) and (known := _parameters(wrong[1], names)):
        function = wrong[1].removesuffix(".__init__")
        return f"{function} takes no argument {wrong[2]!r}{nearest(wrong[2], known)}", one_of(known)
    if (wrong := _MISSING.match(text)) and (known := _parameters(wrong[1], names)):
        # `*args` have no default either.
        needed = sorted(
            name
            for name, parameter in known.items()
            if parameter.default is parameter.empty and "*" not in str(parameter)
        )
        return f"{wrong[1].removesuffix('.__init__')} is called without {wrong[2]}", f"{', '.join(needed)} at least"
    near = ""
    if isinstance(error, NameError) and error.name:
        near = nearest(error.name, {*names, *dir(builtins)})
    elif isinstance(error, AttributeError) and error.name:
        near = nearest(error.name, dir(error.obj))
    elif isinstance(error, ImportError) and (name := _IMPORT.match(text)) and name[2] in sys.modules:
        near = nearest(name[1], dir(sys.modules[name[2]]))
    return f"fails with {type(error).__name__}: {text}{near}", ""


def _parameters(name: str, names: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function by its qualified name, as the code knows it that called it; empty if it does not."""
    first, *rest = name.split(".")
    # `vars`, not `getattr`: some modules import what they are asked for.
    for known in (names, *(vars(module) for module in names.values() if isinstance(module, ModuleType))):
        function = known.get(first)
        for part in rest:
            function = getattr(function, part, None)
        if inspect.isfunction(function) and function.__qualname__ == name:
            parameters = inspect.signature(function).parameters
            return {known: parameter for known, parameter in parameters.items() if known != "self"}
    return {}
