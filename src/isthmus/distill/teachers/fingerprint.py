"""Digests of what a model computes, from its code, settings and numbers; independent of memory addresses and paths."""

import functools
import hashlib
import inspect
import json
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.features.definition import codehash
from isthmus.features.definition.digestnames import digest_name
from isthmus.features.errors import ConfigurationError, Problem

_PLAIN = (str, int, float, complex, bytes, bool, type(None), type(...), range, slice, np.dtype, torch.dtype,
          torch.device, torch.Size, torch.layout)  # fmt: skip
_IRRELEVANT = {"n_jobs", "verbose", "_stop_words_id"}
"""Parameters of estimators that do not affect outputs; `_stop_words_id` is a memory address."""

_NAMES = {"_name_or_path", "architectures", "id2label", "label2id", "transformers_version"}
"""Keys of a transformers configuration that do not affect outputs."""


def fingerprint(value: Any, *, versioned: bool = False) -> str:
    """Return a SHA-256 of a model or a function that changes when its outputs may change, to identify cached outputs.

    Arrays and tensors count by content. The user's functions and classes count by their code and everything that the
    code refers to. Functions and classes of libraries count by name and library version. Other objects count by the
    state that pickle would store, without pickling it.

    Args:
        value: a network, an estimator, a function, or a part of these.
        versioned: True if the caller also identifies the model by a version. Parts whose state cannot be read then
            count only by the name of their type.

    Raises:
        ConfigurationError: the state of a part cannot be read, and `versioned` is False.
    """
    return _Walk(versioned).of(value, type(value).__name__).hex()


class _Unreadable(Exception):
    """A part whose changes cannot be detected; args are its place and the reason."""


class _Walk:
    def __init__(self, versioned: bool) -> None:
        self._versioned = versioned
        self._path: dict[int, int] = {}

    def of(self, value: Any, where: str) -> bytes:
        if isinstance(value, Enum) and type(value.value) not in _PLAIN:  # its repr may contain a memory address
            return _hash(type(value).__qualname__, value.name.encode(), self.of(value.value, where))
        if isinstance(value, Enum) or type(value) in _PLAIN:
            return _hash(type(value).__qualname__, repr(value).encode())
        if id(value) in self._path:
            return _hash("above", str(len(self._path) - self._path[id(value)]).encode())
        self._path[id(value)] = len(self._path)
        try:
            return self._composed(value, where)
        except _Unreadable as error:
            if not self._versioned:
                place, reason = error.args
                raise ConfigurationError(
                    "fingerprint",
                    [Problem(place, reason, "code in a file, numbers and settings")],
                    remedy='pass a version to the teacher, such as version="1", and change it when outputs change;'
                    " or create this part inside the function that uses it",
                ) from error
            return _hash("named", _name(value if isinstance(value, type | types.FunctionType) else type(value)))
        finally:
            del self._path[id(value)]

    def _composed(self, value: Any, where: str) -> bytes:
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value), where)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, nn.Module):
            return self._module(value, where)
        if isinstance(value, types.ModuleType):
            return _hash("module", value.__name__.encode())
        if isinstance(value, types.MethodType):
            return _hash("method", self.of(value.__func__, where), self.of(value.__self__, f"{where}.__self__"))
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | None):
            return _hash("named", _name(value))
        if isinstance(value, type):
            return self._class(value, where)
        if isinstance(value, weakref.ref):
            return self.of(value(), where)
        if type(value) in (list, tuple):
            return _hash(type(value).__name__, *self._items(value, where))
        if type(value) in (set, frozenset):
            return _hash("set", *sorted(self._items(value, where)))
        if isinstance(value, types.MappingProxyType) or type(value) is dict:
            return _hash("dict", *self._pairs(value, where))
        return self._object(value, where)

    def _array(self, array: np.ndarray[Any, Any], where: str) -> bytes:
        shape = repr(array.shape).encode()
        if array.dtype.names:  # hash each field, since padding bytes are arbitrary
            fields = [self._array(array[name], where) for name in array.dtype.names]
            return _hash("array", shape, repr(array.dtype.names).encode(), *fields)
        if array.dtype.hasobject:
            return _hash("array", shape, *self._items(array.ravel().tolist(), where))
        return _hash("array", shape, array.dtype.str.encode(), np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def _tensor(self, tensor: Tensor, where: str) -> bytes:
        try:
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:  # sparse, quantized, without data
            raise _Unreadable(where, str(error)) from error
        return _hash("tensor", repr(tuple(tensor.shape)).encode(), str(tensor.dtype).encode(), raw)

    def _module(self, module: nn.Module, where: str) -> bytes:
        if isinstance(compiled := getattr(module, "_orig_mod", None), nn.Module):
            return self.of(compiled, where)
        if type(module).__module__.startswith("transformers."):
            # The configuration determines all other state.
            state = {"config": getattr(module, "config", None), **dict(module.named_parameters(recurse=False)),
                     **dict(module.named_buffers(recurse=False)), **dict(module.named_children())}  # fmt: skip
            return _hash("pretrained", self.of(type(module), where), *self._pairs(state, where))
        try:
            attributes: Any = module.__getstate__()  # type: ignore[no-untyped-call,unused-ignore]
        except RuntimeError:  # a module with parametrizations
            attributes = vars(module)
        # Drop the keys of hooks, which are process-wide counters, and all hooks except forward hooks.
        state = {
            key: list(value.values()) if "_hooks" in key else value
            for key, value in attributes.items()
            if key != "training" and ("_hooks" not in key or key.startswith("_forward"))
        }
        return _hash("network", self.of(type(module), where), *self._pairs(state, where))

    def _function(self, function: types.FunctionType, where: str) -> bytes:
        if not codehash.is_user_code(function):
            return _hash("named", _name(function))
        try:
            # Code only; globals and closures are hashed below.
            digest = codehash.digest(function, state=False).encode()
        except (OSError, SyntaxError) as error:
            raise _Unreadable(where, f"the code of {function.__qualname__} cannot be read: {error}") from error
        seen = inspect.getclosurevars(function)
        return _hash("function", digest, *self._pairs({**seen.globals, **seen.nonlocals}, where),
                     self.of(function.__defaults__, where), self.of(function.__kwdefaults__, where))  # fmt: skip

    def _class(self, kind: type, where: str) -> bytes:
        if not codehash.is_user_code(kind) and _of_library(kind):
            return _hash("named", _name(kind))
        try:
            return _hash("class", codehash.digest(kind).encode(), *(self.of(base, where) for base in kind.__bases__))
        except (OSError, SyntaxError, TypeError) as error:
            raise _Unreadable(where, f"the code of {kind.__qualname__} cannot be read: {error}") from error

    def _object(self, value: Any, where: str) -> bytes:
        if type(value).__module__.startswith("transformers.") and hasattr(value, "to_dict"):
            options = {key: item for key, item in value.to_dict().items() if key not in _NAMES}
            return _hash("configuration", json.dumps(options, sort_keys=True, default=str).encode())
        try:
            create, *rest = codehash.pickle_state(value)
        except OSError as error:
            raise _Unreadable(where, str(error)) from error
        if isinstance(create, str):
            return _hash("named", f"{type(value).__module__}.{create}".encode())
        arguments, *rest = rest
        state, items, pairs = (*rest, None, None, None)[:3]
        if type(value) is functools.partial:  # the order of keywords does not matter
            state = (*state[:2], dict(sorted(state[2].items())), state[3])
        if hasattr(value, "get_params") and isinstance(state, dict):
            state = {key: part for key, part in state.items() if key not in _IRRELEVANT}
        parts = [self.of(type(value), where), self.of(create, where), self.of(arguments, where)]
        parts.append(_hash("state", *self._pairs(state, where)) if isinstance(state, dict) else self.of(state, where))
        parts += [*self._items(items or (), where), *self._items(pairs or (), where)]
        return _hash("object", *parts)

    def _items(self, values: Iterable[Any], where: str) -> list[bytes]:
        return [self.of(value, f"{where}[{place}]") for place, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], where: str) -> list[bytes]:
        # Keep the order: a network runs its parts in order.
        return [_hash("pair", self.of(key, where), self.of(value, f"{where}.{key}")) for key, value in values.items()]


def _hash(kind: str, *parts: Any) -> bytes:
    sha = hashlib.sha256(f"{kind} {len(parts)}".encode())
    for part in parts:
        sha.update(f" {memoryview(part).nbytes} ".encode())
        sha.update(part)
    return sha.digest()


def _of_library(kind: type) -> bool:
    """Return True if a class is from an installed package; a class typed at a prompt has no file and may change."""
    root = kind.__module__.split(".")[0]
    module = sys.modules.get(root)
    return root in sys.stdlib_module_names or hasattr(module, "__path__") or bool(getattr(module, "__file__", None))


def _name(value: Any) -> bytes:
    module = getattr(value, "__module__", None) or ""
    library = sys.modules.get(module.split(".")[0])
    version = getattr(library, "__version__", "")
    return f"{digest_name(module, getattr(value, '__qualname__', value.__name__))} {version}".encode()
