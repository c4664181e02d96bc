"""Why definitions do not run: Python's words, with the name that was probably meant."""

import builtins
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from isthmus.features.errors import nearest, one_of

_ARGUMENT = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'")
_IMPORT = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def reason(error: BaseException, names: Mapping[str, Any]) -> tuple[str, str]:
    """What was found, and what was expected if that is known; `names` are those of the module that failed."""
    text = str(error).rstrip(".")
    if (wrong := _ARGUMENT.match(text)) and (known := _parameters(wrong[1])):
        function = wrong[1].removesuffix(".__init__")
        return f"{function} takes no argument {wrong[2]!r}{nearest(wrong[2], known)}", one_of(known)
    near = ""
    if isinstance(error, NameError) and error.name:
        near = nearest(error.name, {*names, *dir(builtins)})
    elif isinstance(error, AttributeError) and error.name:
        near = nearest(error.name, dir(error.obj))
    elif isinstance(error, ImportError) and (name := _IMPORT.match(text)) and name[2] in sys.modules:
        near = nearest(name[1], dir(sys.modules[name[2]]))
    return f"fails with {type(error).__name__}: {text}{near}", ""


def _parameters(name: str) -> list[str]:
    """The parameters of a function of ours by its qualified name; empty if there is none."""
    first, *rest = name.split(".")
    for module in [module for place, module in sys.modules.items() if place.partition(".")[0] == "isthmus"]:
        # `vars`, not `getattr`: some modules import what they are asked for.
        function = vars(module).get(first)
        for part in rest:
            function = getattr(function, part, None)
        if callable(function) and getattr(function, "__qualname__", "") == name:
            return [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    return []
