"""A digest of what a function computes. Formatting, comments and the location of the code do not change it.

It covers the function's syntax tree and default arguments, and all user code that it refers to: functions, classes,
instances, constants, and assignments of library objects to names. Library code counts only by its name.
"""

import ast
import contextlib
import copyreg
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import linecache
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from isthmus.features.definition.digestnames import digest_name
from isthmus.features.definition.usercode import is_users_file, is_users_module

_NAMED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_CONSTANTS = (str, int, float, bool, bytes, complex, type(None), date, datetime, timedelta)


class _Seen(list[object]):
    """The objects on the path to a value, to end recursion. With `state`, unassigned library objects count."""

    def __init__(self, items: Iterable[object], *, state: bool) -> None:
        super().__init__(items)
        self.state = state


def digest(function: Callable[..., Any], *, state: bool = True) -> str:
    """Return the SHA-256, in hex, of everything that determines a function's result, to notice that it changed.

    It covers the source of the function, and the user's functions, classes and values that it uses. This may import
    user modules that the function imports. With `state=False`, library objects in containers, instances and closures
    are left out, and the caller must hash them.

    Raise OSError if the source or the state of an object cannot be read, and SyntaxError if the file no longer matches
    the loaded code.
    """
    try:
        described = _describe(function, _Seen([], state=state))
    except RecursionError:
        raise OSError(f"{location(function)} uses objects that are nested too deeply") from None
    if described is None:
        raise OSError(f"{location(function)} is not written in Python in a file of the project")
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def described(tree: ast.stmt, kind: type, seen: Iterable[object]) -> list[Any]:
    return _statement(tree, kind, _Seen(seen, state=True))


def class_tree(kind: type) -> ast.ClassDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    file = ast.walk(ast.parse("".join(inspect.findsource(kind)[0])))
    same = [node for node in file if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    if len(same) > 1:  # of several classes of a name, `inspect` finds the first before Python 3.13
        codes = [part.__code__ for part in vars(kind).values() if isinstance(part, types.FunctionType)]
        lines = [code.co_firstlineno for code in codes if code.co_qualname.startswith(f"{kind.__qualname__}.")]
        around = [node for node in same if any(node.lineno < line <= (node.end_lineno or 0) for line in lines)]
        tree = around[-1] if around else tree
    assert isinstance(tree, ast.ClassDef)  # noqa: S101 - the source of a class
    return tree


def location(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return getattr(function, "__name__", None) or type(function).__name__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def is_user_code(value: types.FunctionType | type) -> bool:
    file = value.__code__.co_filename if isinstance(value, types.FunctionType) else None
    # Compiled files that were moved without their source name places of another machine.
    return is_users_file(file if file and (Path(file).exists() or not _file(value)) else _file(value))


def pickle_state(value: Any) -> tuple[Any, ...]:
    try:
        registered = copyreg.dispatch_table.get(type(value))
        state = registered(value) if registered else value.__reduce_ex__(2)
    except Exception as error:  # any class may define `__reduce_ex__`
        raise OSError(f"a {type(value).__name__} has no state: {error}") from error
    # An iterator's own state may name what it iterates, which is described already.
    return (state,) if isinstance(state, str) else tuple([*p] if isinstance(p, Iterator) else p for p in state)


def _describe(value: Any, seen: _Seen, within: tuple[object, ...] = ()) -> Any:
    """Return a value as plain data, or None for a library object outside of a container."""
    # `within` holds the containers since the last item of `seen`. Both end recursion.
    if isinstance(value, _CONSTANTS):
        return [repr(value), *methods] if (methods := _methods(value, seen)) else repr(value)
    if any(value is earlier for earlier in within):
        return ["within", next(depth for depth, earlier in enumerate(reversed(within)) if value is earlier)]
    inner = (*within, value)
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(_describe(item, seen, inner) for item in value), *_methods(value, seen)]
    if isinstance(value, set | frozenset):
        # In no order: each item is described as if it were the only one.
        return [
            type(value).__name__,
            *sorted(json.dumps(_describe(item, _Seen(seen, state=seen.state), inner)) for item in value),
        ]
    if isinstance(value, dict | types.MappingProxyType):
        pairs = ([_describe(key, seen, inner), _describe(item, seen, inner)] for key, item in value.items())
        default = [_describe(value.default_factory, seen, inner)] if isinstance(value, defaultdict) else []
        return ["dict", *pairs, *default, *_methods(value, seen)]
    if isinstance(value, functools.partial):
        keywords = dict(sorted(value.keywords.items()))
        return ["partial", *(_describe(part, seen, inner) for part in (value.func, value.args, keywords))]
    registry = vars(value).get("registry") if isinstance(value, types.FunctionType) else None
    if isinstance(registry, types.MappingProxyType):  # of a singledispatch
        return [_describe([*pair], seen, inner) for pair in registry.items()]
    if callable(value) and not _wraps(value, outermost=not seen):
        value = inspect.unwrap(value)
    for position, earlier in enumerate(seen):
        if value is earlier:
            return position
    if isinstance(value, types.FunctionType | type) and is_user_code(value):
        seen.append(value)
        return _class(value, seen) if isinstance(value, type) else _function(value, seen)
    if hasattr(value, "__dict__") and is_users_file(_file(type(value))):
        seen.append(value)
        return [_describe(type(value), seen), _describe(vars(value), seen)]
    return _state(value, seen, inner) if within else None


def _state(value: Any, seen: _Seen, within: tuple[object, ...]) -> Any:
    """Describe an object that no module statement assigns: part of a container, an instance or a closure."""
    if not seen.state or type(value).__module__ == "isthmus.features.definition.spec":
        return None  # a declaration is in the contract
    if isinstance(value, types.MethodType):
        return ["method", value.__name__, _describe(value.__self__, seen, within)]
    if isinstance(value, _NAMED):
        if (owner := getattr(value, "__self__", None)) is None or isinstance(owner, types.ModuleType | type):
            name = getattr(value, "__qualname__", value.__name__)
            return ["named", digest_name(getattr(value, "__module__", None) or "", name)]
        return ["method", value.__name__, _describe(owner, seen, within)]
    if hasattr(value, "tolist") and hasattr(value, "shape") and not hasattr(value, "index"):
        # An array or a tensor: its state holds places in memory, or names of modules that NumPy has moved.
        return ["array", repr(value.dtype), list(value.shape), _describe(value.tolist(), seen, within)]
    return ["object", *(_describe(part, seen, within) for part in (type(value), *pickle_state(value)))]


def _methods(value: Any, seen: _Seen) -> list[Any]:
    kind = type(value)
    own = [part for part in vars(kind).values() if isinstance(part, types.FunctionType | property | classmethod)]
    files = [getattr(getattr(part, "fget", getattr(part, "__func__", part)), "__code__", None) for part in own]
    if kind.__module__ != "builtins" and any(code and Path(code.co_filename).exists() for code in files):
        kinds = [described] if (described := _describe(kind, seen)) is not None else []
        return [*kinds, *([_describe(vars(value), seen)] if kinds and getattr(value, "__dict__", None) else [])]
    return []


def _wraps(value: Any, *, outermost: bool) -> bool:
    """Return whether a user's function wraps another without appearing as a decorator in its source."""
    inner = inspect.unwrap(value)
    if inner is value or not (isinstance(value, types.FunctionType) and is_user_code(value)):
        return False
    if outermost or not (isinstance(inner, types.FunctionType) and is_user_code(inner)):
        return True
    wrappers: list[Any] = []
    inspect.unwrap(value, stop=wrappers.append)
    return len(wrappers) > sum(len(getattr(node, "decorator_list", ())) for node in _parse(inner).body)


def _function(function: types.FunctionType, seen: _Seen) -> list[Any]:
    # The decorator of the feature function (entities, schema, ttl) is already in the contract.
    tree = _normal(_parse(function), decorated=inspect.unwrap(seen[0]) is not function)  # type: ignore[arg-type]
    cells = dict(_cells(function))
    defaults = _describe([list(function.__defaults__ or ()), function.__kwdefaults__ or {}], seen)
    return [ast.unparse(tree), defaults, _references_in(tree, {**function.__globals__, **cells}, cells, seen)]


def _class(value: type, seen: _Seen) -> list[Any]:
    try:
        tree = class_tree(value)
    except OSError:
        # Created by a call, like a named tuple.
        made = _assignments(value, vars(sys.modules[value.__module__]), value.__name__, seen)
        return [value.__qualname__, made or list(getattr(value, "_fields", ()))]
    return _statement(tree, value, seen)


def _statement(tree: ast.stmt, kind: type, seen: _Seen) -> list[Any]:
    normal = _normal(ast.Module([tree], []), decorated=True)
    described = [ast.unparse(normal), _references_in(normal, *_scope(kind), seen)]
    if "<locals>" in kind.__qualname__:
        # The body of the class may have read what the function around it bound.
        stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        plain = ((name, part) for name, part in vars(kind).items() if name in stored and not hasattr(part, "__get__"))
        described.append(_describe([*kind.__bases__, dict(plain)], seen))
    return described


def _scope(kind: type) -> tuple[dict[str, Any], set[str]]:
    """Return the names that the code of a class can read, and which of them come from an enclosing function."""
    cells: dict[str, Any] = {}
    for part in vars(kind).values():
        if isinstance(part, type) and part.__qualname__.startswith(f"{kind.__qualname__}."):
            names, inner = _scope(part)
            cells |= {name: names[name] for name in inner}
        part = part.func if isinstance(part, functools.cached_property) else getattr(part, "__func__", part)
        for each in (part.fget, part.fset) if isinstance(part, property) else (part,):
            function: Any = inspect.unwrap(each) if callable(each) else None
            made = isinstance(function, types.FunctionType) and function.__code__.co_qualname
            if made and made.startswith(f"{kind.__qualname__}."):  # not a decorator's
                cells |= _cells(function)
    cells.pop("__class__", None)
    return {**vars(sys.modules[kind.__module__]), **cells}, {*cells}


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


def _parse(function: types.FunctionType) -> ast.Module:
    # From the code: the source of a function that wraps another would be the other's.
    if function.__name__ != "<lambda>":
        return ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    # The lines of a lambda may be no complete statement: take the lambdas of its line from the whole file.
    file, line = ast.parse("".join(inspect.findsource(function.__code__)[0])), function.__code__.co_firstlineno
    lambdas = [node for node in ast.walk(file) if isinstance(node, ast.Lambda) and node.lineno == line]
    places = [((line, start), (last, end)) for line, last, start, end in function.__code__.co_positions() if end]
    around = [node for node in lambdas if places and all(map(functools.partial(_holds, node.body), places))]
    return ast.Module([ast.Expr(node) for node in around[-1:] or lambdas], [])


def _holds(node: ast.expr, place: tuple[Any, Any]) -> bool:
    first, end = place
    return bool((node.lineno, node.col_offset) <= first and end <= (node.end_lineno, node.end_col_offset))


def _references_in(
    tree: ast.AST, names: Mapping[str, Any], cells: Collection[str], seen: _Seen
) -> list[tuple[str, Any]]:
    references = []
    names = {**names, **_imports(tree, names.get("__package__"))}
    for reference in _references(tree):
        head, *attributes = reference.split(".")
        if head not in names or head == "__file__":  # the place of the code
            continue
        value = _resolve(names[head], attributes)
        known = len(seen)
        try:
            described = _describe(value, seen, (cells,) if head in cells else ())
        except OSError as error:
            del seen[known:]
            if any(value is earlier for earlier in seen):
                continue  # the statement that assigns it
            if isinstance(value, types.FunctionType | type) or not (
                described := _assignments(value, names, reference, seen)
            ):
                raise OSError(f"{reference}: {error}; make it inside the function that uses it") from error
        own = type(value).__module__.startswith("isthmus.")
        if described is None and not isinstance(value, _NAMED) and not own and head not in cells:
            described = _assignments(value, names, reference, seen)
        if described is not None:
            references.append((reference, described))
    return references


def _imports(tree: ast.AST, package: str | None) -> dict[str, Any]:
    bound: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                if _load(alias.name) is not None:
                    bound[alias.asname or name] = sys.modules[name]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            origin = _origin(node, package)
            module = _load(origin)
            for alias in node.names if module is not None else ():
                value = getattr(module, alias.name, None)
                bound[alias.asname or alias.name] = _load(f"{origin}.{alias.name}") if value is None else value
    return bound


def _origin(statement: ast.ImportFrom, package: str | None) -> str:
    module = statement.module or ""
    return importlib.util.resolve_name("." * statement.level + module, package) if statement.level else module


def _load(name: str) -> types.ModuleType | None:
    """Import a user module. Return None for a library, and for a module that fails to load: running it will say why."""
    top = name.partition(".")[0]
    try:
        spec = None if top in sys.modules else importlib.util.find_spec(top)
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        if is_users_module(sys.modules.get(top)) or any(map(is_users_file, places)):
            return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - the user's own code may raise anything
        return None
    return None


def _assignments(value: Any, names: Mapping[str, Any], reference: str, seen: _Seen) -> Any:
    """Return the top-level statements of a user module that assign a value, and what they refer to."""
    head, *attributes = reference.split(".")
    for attribute in attributes:
        if is_users_module(names[head]):
            names, head = vars(names[head]), attribute
    file = str(names.get("__file__"))
    if not is_users_file(names.get("__file__")) or not file.endswith(".py"):  # a compiled module has no statements
        return None
    assignments: list[Any] = []
    # Also from an archive on the path.
    linecache.checkcache(file)
    for statement in ast.parse("".join(linecache.getlines(file, dict(names)))).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        nodes = [*ast.walk(statement)]
        for node in nodes:
            origin = _origin(node, names.get("__package__")) if isinstance(node, ast.ImportFrom) else ""
            if isinstance(node, ast.ImportFrom) and (module := sys.modules.get(origin)):
                there = {alias.asname or alias.name: alias.name for alias in node.names}
                name = head if "*" in there and vars(module).get(head) is value else there.get(head)
                if name is not None:
                    return _assignments(value, vars(module), name, seen)
        if any(isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == head for node in nodes):
            seen.append(value)
            assignments.append([ast.unparse(statement), _references_in(statement, names, (), seen)])
    return assignments or None


def _resolve(value: Any, attributes: list[str]) -> Any:
    for attribute in attributes:
        if not is_users_module(value):
            break
        value = getattr(value, attribute, None)
    return value


def _file(value: type | types.FunctionType) -> str | None:
    return getattr(sys.modules.get(value.__module__), "__file__", None)


def _references(tree: ast.AST) -> list[str]:
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
    return list(function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount])
