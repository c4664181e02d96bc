"""A digest of what a function computes. Formatting, comments and the place of the code do not change it.

It covers the function's syntax tree, its default arguments, and all user code it refers to: helper functions in any
user module, classes and their instances, constants, and for library objects (a PySpark column, a compiled pattern) the
statement that assigns them. Code of the standard library and of installed packages counts by its name only.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

# A virtual environment may also use the site-packages of its base interpreter.
_LIBRARIES = [
    path
    for path in sys.path
    if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_relative_to(sys.base_prefix)
]
_INSTALLED = tuple(
    Path(path).resolve()
    for path in (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), *_LIBRARIES)
)
_OWN = Path(__file__).resolve().parents[2]
_NAMED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_CONSTANTS = (str, int, float, bool, bytes, complex, type(None), date, datetime, timedelta)


def digest(function: Callable[..., Any]) -> str:
    """SHA-256 of what a function computes.

    Raises:
        OSError: the function's source cannot be read, for example because it was typed at a prompt.
        SyntaxError: the file at its place holds other code.
    """
    described = _described(function, [])
    if described is None:
        raise OSError(f"{location(function)} is not written in Python in a file of the project")
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def described(tree: ast.stmt, module: str, seen: Sequence[object]) -> list[Any]:
    """A statement of a user module, and the user code it refers to, as plain data; `seen` count by their place."""
    normal = _normal(ast.Module([tree], []), decorated=True)
    return [ast.unparse(normal), _referred(normal, vars(sys.modules[module]), [*seen])]


def location(function: Callable[..., Any]) -> str:
    """`file:line` of a function, for messages; its name if it has no Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return getattr(function, "__name__", None) or type(function).__name__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def of_user(value: types.FunctionType | type) -> bool:
    """Whether a function or class is user code, so that its code counts; otherwise only its name does."""
    return _is_users(value.__code__.co_filename if isinstance(value, types.FunctionType) else _file(value))


def _described(value: Any, seen: list[object]) -> Any:
    """A value as plain data; None for library code. `seen` are the objects on the way here, to end recursion."""
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(_described(item, seen) for item in value)]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, *sorted(json.dumps(_described(item, seen)) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([_described(key, seen), _described(item, seen)] for key, item in value.items())]
    if isinstance(value, functools.partial):
        described = _described(value.func, seen)
        return described and ["partial", described, _described(value.args, seen), _described(value.keywords, seen)]
    if callable(value):
        value = inspect.unwrap(value)
    for position, earlier in enumerate(seen):
        if value is earlier:
            return position
    if isinstance(value, types.FunctionType | type) and of_user(value):
        seen.append(value)
        return _class(value, seen) if isinstance(value, type) else _function(value, seen)
    if hasattr(value, "__dict__") and _is_users(_file(type(value))):
        seen.append(value)
        return [_described(type(value), seen), _described(vars(value), seen)]
    return None


def _function(function: types.FunctionType, seen: list[object]) -> list[Any]:
    # The decorator of the feature function (entities, schema, ttl) is already in the contract.
    tree = _normal(_parsed(function), decorated=len(seen) > 1)
    names = dict(function.__globals__)
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[free] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    defaults = _described([list(function.__defaults__ or ()), function.__kwdefaults__ or {}], seen)
    return [ast.unparse(tree), defaults, _referred(tree, names, seen)]


def _class(value: type, seen: list[object]) -> list[Any]:
    try:
        tree = _normal(ast.parse(textwrap.dedent(inspect.getsource(value))), decorated=True)
    except OSError:
        # A named tuple, created by a call: only its fields count.
        return [value.__qualname__, list(getattr(value, "_fields", ()))]
    return [ast.unparse(tree), _referred(tree, vars(sys.modules[value.__module__]), seen)]


def _parsed(function: types.FunctionType) -> ast.Module:
    if function.__name__ != "<lambda>":
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    # The lines of a lambda may be no complete statement: take all lambdas of its line from the whole file.
    file, line = ast.parse("".join(inspect.findsource(function)[0])), function.__code__.co_firstlineno
    lambdas = (node for node in ast.walk(file) if isinstance(node, ast.Lambda) and node.lineno == line)
    return ast.Module([ast.Expr(node) for node in lambdas], [])


def _referred(tree: ast.AST, names: Mapping[str, Any], seen: list[object]) -> list[tuple[str, Any]]:
    """The names of user code that a tree reads, with what they stand for."""
    references = []
    names = {**names, **_imported(tree, names.get("__package__"))}
    for reference in _references(tree):
        head, *attributes = reference.split(".")
        if head not in names:
            continue
        value = _resolve(names[head], attributes)
        described = _described(value, seen)
        if described is None and not isinstance(value, _NAMED) and not type(value).__module__.startswith("isthmus."):
            described = _assigned(value, names, reference, seen)
        if described is not None:
            references.append((reference, described))
    return references


def _imported(tree: ast.AST, package: str | None) -> dict[str, Any]:
    """The names that import statements inside of a tree bind to user code. Library modules are not loaded."""
    bound: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                if _loaded(alias.name) is not None:
                    bound[alias.asname or name] = sys.modules[name]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            origin = _origin(node, package)
            module = _loaded(origin)
            for alias in node.names if module is not None else ():
                value = getattr(module, alias.name, None)
                bound[alias.asname or alias.name] = _loaded(f"{origin}.{alias.name}") if value is None else value
    return bound


def _origin(statement: ast.ImportFrom, package: str | None) -> str:
    module = statement.module or ""
    return importlib.util.resolve_name("." * statement.level + module, package) if statement.level else module


def _loaded(name: str) -> types.ModuleType | None:
    """A user module; None for a library, and for a module that cannot be loaded: running the code will say why."""
    top = name.partition(".")[0]
    try:
        spec = None if top in sys.modules else importlib.util.find_spec(top)
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        if _is_users_module(sys.modules.get(top)) or any(map(_is_users, places)):
            return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - the user's own code may raise anything
        return None
    return None


def _assigned(value: Any, names: Mapping[str, Any], reference: str, seen: list[object]) -> Any:
    """The top-level statements of a user module that assign a value, and what they refer to."""
    head, *attributes = reference.split(".")
    for attribute in attributes:
        if _is_users_module(names[head]):
            names, head = vars(names[head]), attribute
    file = str(names.get("__file__"))
    if not _is_users(names.get("__file__")) or not file.endswith(".py"):  # a compiled module has no statements
        return None
    assignments: list[Any] = []
    for statement in ast.parse(Path(file).read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            module = sys.modules.get(_origin(statement, names.get("__package__")))
            for alias in statement.names:
                if (alias.asname or alias.name) == head and module is not None:
                    return _assigned(value, vars(module), alias.name, seen)
        stored = (
            node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not definition and any(node.id == head for node in stored):
            seen.append(value)
            assignments.append([ast.unparse(statement), _referred(statement, names, seen)])
    return assignments or None


def _resolve(value: Any, attributes: list[str]) -> Any:
    for attribute in attributes:
        if not _is_users_module(value):
            break
        value = getattr(value, attribute, None)
    return value


def _file(value: type) -> str | None:
    return getattr(sys.modules.get(value.__module__), "__file__", None)


def _is_users_module(value: Any) -> bool:
    if not isinstance(value, types.ModuleType):
        return False
    # A namespace package has only a `__path__`.
    return any(map(_is_users, [getattr(value, "__file__", None), *getattr(value, "__path__", ())]))


def _is_users(file: str | None) -> bool:
    if not file or file.startswith("<frozen "):
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(installed) for installed in (*_INSTALLED, _OWN))


def _references(tree: ast.AST) -> list[str]:
    """Every dotted name in a tree, and each of its prefixes."""
    references = set()
    for node in ast.walk(tree):
        dotted: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            dotted.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            references.add(".".join([inner.id, *dotted]))
    return sorted(references)


def _normal(tree: ast.Module, *, decorated: bool) -> ast.Module:
    # Docstrings do not count; `decorated` says whether the decorators of the outermost function do.
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = getattr(node.body[0], "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and isinstance(node.body[0], ast.Expr):
                node.body = node.body[1:] or [ast.Pass()]
    if not decorated and tree.body and isinstance(tree.body[0], ast.FunctionDef):
        tree.body[0].decorator_list = []
    return tree


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters, in order."""
    return list(function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount])
