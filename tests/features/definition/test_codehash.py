import compileall
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies

from isthmus.features.definition.codehash import digest, location

_COUNT = itertools.count()

BASE = """\
import functools
import math
from dataclasses import dataclass
from itertools import chain
from os.path import join

LIMIT = 15
NAMES = {"x": {"b", "a", "c"}, "y": (1, 2)}


def half(value):
    return value / 2


def unused(value):
    return value


def late(flights):
    return half(flights) + LIMIT + math.pi + len(NAMES)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Makes a module of the user's from a text, each time in a file of its own."""

    def make(text: str, name: str | None = None) -> types.ModuleType:
        folder = tmp_path / str(next(_COUNT))
        folder.mkdir()
        path = folder / f"{name or 'definitions'}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    return make


Load = Callable[..., Any]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return half(flights)", "    # halved\n\n    return half(flights)"),
        ("def late(flights):", 'def late(flights):\n    """Late flights."""'),
        ("def half(value):", 'def half(value):\n    """Half of it."""\n'),
        (
            "half(flights) + LIMIT + math.pi + len(NAMES)",
            "(\n        half( flights ) + LIMIT\n        + math.pi + len(NAMES))",
        ),
        ("return value\n", "return value + 1\n"),
        ("LIMIT = 15", "LIMIT = 10 + 5"),
        ("LIMIT = 15", "OTHER = 1\nLIMIT = 15"),
        ('{"b", "a", "c"}', '{"c", "b", "a"}'),
    ],
)
def test_form_does_not_change_the_digest(load: Load, old: str, new: str) -> None:
    assert old in BASE
    assert digest(load(BASE.replace(old, new)).late) == digest(load(BASE).late)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 15", "LIMIT = 16"),
        ("LIMIT = 15", "LIMIT = 15.0"),
        ("LIMIT = 15", "LIMIT = '15'"),
        ("value / 2", "value / 3"),
        ("+ LIMIT", "- LIMIT"),
        ("math.pi", "math.e"),
        ('"a", "c"', '"a", "d"'),
        ("(1, 2)", "(1, 3)"),
        ("def late(flights):", "def late(flights, extra=1):"),
        ("def late(flights):", "def late(flights, *, extra=1):"),
    ],
)
def test_meaning_changes_the_digest(load: Load, old: str, new: str) -> None:
    assert old in BASE
    assert digest(load(BASE.replace(old, new)).late) != digest(load(BASE).late)


def _differ(load: Load, text: str, old: str, new: str) -> None:
    assert old in text
    first = digest(load(text).f)
    assert first == digest(load(text).f)
    assert first != digest(load(text.replace(old, new)).f)


def test_the_name_and_place_of_the_module_do_not_matter(load: Load) -> None:
    assert digest(load(BASE, "one").late) == digest(load("\n\n" + BASE, "two").late)
    text = "from pathlib import Path\nFOLDER = Path(__file__).parent\ndef f(x): return x, FOLDER, __file__\n"
    assert digest(load(text).f) == digest(load(text).f)


def test_helpers_and_constants_of_another_module_of_the_users(load: Load) -> None:
    main = "import helper\n\ndef f(x):\n    return helper.scaled(x) + helper.LIMIT\n"
    helper = "LIMIT = 1\nFACTOR = 2\ndef deep(x):\n    return x * FACTOR\n\ndef scaled(x):\n    return deep(x)\n"
    found = set()
    for text in (helper, helper.replace("FACTOR = 2", "FACTOR = 3"), helper.replace("LIMIT = 1", "LIMIT = 2"),
                 helper.replace("x * FACTOR", "x + FACTOR"), helper + "\nOTHER = 1\n"):  # fmt: skip
        load(text, "helper")
        found.add(digest(load(main).f))
    assert len(found) == 4


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("from helper import scaled", "scaled"),
        ("from helper import scaled as other", "other"),
        ("import helper", "helper.scaled"),
        ("import helper as other", "other.scaled"),
        ("import parts.helper", "parts.helper.scaled"),
        ("from parts import helper", "helper.scaled"),
        ("from parts.helper import scaled", "scaled"),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_helpers_are_followed_wherever_they_are_imported(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: str, call: str, inside: bool
) -> None:
    """In modules beside the definitions, and in a folder of such without an `__init__.py`."""
    main = f"def f(x):\n    {imports}\n    return {call}(x)\n" if inside else f"{imports}\ndef f(x): return {call}(x)\n"
    found = []
    for turn, factor in enumerate((2, 3)):
        folder = tmp_path / f"project_{turn}"
        (folder / "parts").mkdir(parents=True)
        for file in (folder / "helper.py", folder / "parts" / "helper.py"):
            file.write_text(f"def scaled(x):\n    return x * {factor}\n")
        monkeypatch.syspath_prepend(str(folder))
        for name in ("helper", "parts", "parts.helper"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        found += [digest(load(main).f), digest(load(main).f)]
    assert found[0] == found[1] != found[2]


def test_what_is_imported_inside_of_a_library_or_of_nowhere_is_named_only(load: Load) -> None:
    text = "def f(x):\n    import torch.nn, nowhere.at.all\n    from json import dumps\n    return dumps(x + 1)\n"
    before = set(sys.modules)
    _differ(load, text, "x + 1", "x + 2")
    assert not any(name.partition(".")[0] == "torch" for name in set(sys.modules) - before)


def test_constants_of_the_same_name_in_two_modules(load: Load) -> None:
    main = "from helper import scaled\nLIMIT = 1\n\ndef f(x):\n    return scaled(x) + LIMIT\n"
    helper = "LIMIT = 2\n\ndef scaled(x):\n    return x + LIMIT\n"
    found = set()
    for a, b in ((1, 2), (1, 3), (4, 2), (2, 1)):
        load(helper.replace("LIMIT = 2", f"LIMIT = {b}"), "helper")
        found.add(digest(load(main.replace("LIMIT = 1", f"LIMIT = {a}")).f))
    assert len(found) == 4


def test_closures(load: Load) -> None:
    text = """
        def make(n):
            def inner(x):
                return x + n
            return inner
        f = make(1)
        """
    _differ(load, text, "make(1)", "make(2)")


def test_two_closures_of_one_factory(load: Load) -> None:
    text = """
        def make(n):
            def inner(x):
                return x + n
            return inner
        once, twice = make(1), make(2)
        def f(x):
            return once(x) - twice(x)
        """
    _differ(load, text, "make(2)", "make(3)")
    _differ(load, text, "make(1)", "make(3)")


def test_two_classes_of_one_factory(load: Load) -> None:
    text = """
        LIMIT = 15
        def counted(function):
            LIMIT = 1
            def call(self, x):
                return function(self, x) + LIMIT
            return call
        def made(n):
            class Made:
                @staticmethod
                def all(): return n
                def __call__(self, x): return x * n + LIMIT
            return Made
        Made = made(2)
        class Plain:
            @counted
            def __call__(self, x): return x + LIMIT
        def f(x): return Made()(x)
        def g(x): return Plain()(x)
    """
    _differ(load, text, "made(2)", "made(3)")
    one, other = (digest(load(text.replace("LIMIT = 15", f"LIMIT = {limit}")).g) for limit in (15, 16))
    assert one != other  # what a decorator binds hides no name of the module


def test_lambdas_in_a_file(load: Load) -> None:
    text = """
        A = lambda x: x + 1
        B = lambda x: x + 2
        def f(x):
            return A(x) * B(x)
        """
    _differ(load, text, "x + 2", "x + 3")
    _differ(load, text, "x + 1", "x + 3")
    _differ(load, "f = lambda x: x + 1\n", "x + 1", "x + 2")


def test_default_arguments_that_come_from_elsewhere(load: Load) -> None:
    text = """
        def make(n):
            def inner(x, n=n):
                return x + n
            return inner
        f = make(1)
        """
    _differ(load, text, "make(1)", "make(2)")
    _differ(load, text.replace("x, n=n", "x, *, n=n"), "make(1)", "make(2)")
    _differ(load, "LIMIT = 1\ndef f(x, n=LIMIT):\n    return n\n", "LIMIT = 1", "LIMIT = 2")


def test_recursion(load: Load) -> None:
    text = """
        def even(n):
            return n == 0 or odd(n - 1)
        def odd(n):
            return n != 0 and even(n - 1)
        def f(n):
            return f(n - 1) if n > 9 else even(n)
        """
    _differ(load, text, "n != 0", "n != 1")
    _differ(load, text, "n > 9", "n > 8")


def test_wrapped_helpers_are_followed(load: Load) -> None:
    for decorator in ("functools.lru_cache(maxsize=5)", "wrapping"):
        text = f"""
            import functools
            def wrapping(function):
                @functools.wraps(function)
                def call(*args):
                    return function(*args)
                return call
            @{decorator}
            def helper(x):
                return x + 1
            def f(x):
                return helper(x)
            """
        _differ(load, text, "x + 1", "x + 2")


def test_partial_helpers_are_followed(load: Load) -> None:
    text = """
        import functools
        def scaled(x, n, m=1):
            return x * n * m
        double = functools.partial(scaled, n=2)
        def f(x):
            return double(x)
        """
    _differ(load, text, "n=2", "n=3")
    _differ(load, text, "x * n * m", "x * n - m")


def test_classes_and_what_their_methods_refer_to(load: Load) -> None:
    text = """
        LIMIT = 1
        class Rule:
            factor = 2
            def apply(self, x):
                return x * self.factor + LIMIT
        def f(x):
            return Rule().apply(x)
        """
    _differ(load, text, "factor = 2", "factor = 3")
    _differ(load, text, "LIMIT = 1", "LIMIT = 2")


def test_names_of_compiled_and_frozen_modules_are_named_only(load: Load) -> None:
    text = """
        from array import array
        from itertools import chain
        from os.path import join
        def f(x):
            return chain(x, array("b"), [join("a", "b"), 1])
        """
    _differ(load, text, ", 1]", ", 2]")
    # Such a module is in no file.
    _differ(load, "import sys, time\n\ndef f(x):\n    return time.time() + sys.maxsize + 1\n", "+ 1", "+ 2")


def test_lambdas_in_containers_of_many_lines(load: Load) -> None:
    text = """
        RULES = {
            "one": lambda x: x + 1,
            "two": lambda x: x + 2,
        }
        def f(x):
            return RULES["one"](x)
        """
    _differ(load, text, "x + 1", "x + 3")
    _differ(load, text, "x + 2", "x + 3")


def test_instances_of_dataclasses_and_named_tuples(load: Load) -> None:
    text = """
        from collections import namedtuple
        from dataclasses import dataclass
        @dataclass
        class Rule:
            factor: int
        Point = namedtuple("Point", "x y")
        RULE, ORIGIN = Rule(2), Point(0, 1)
        def f(x):
            return x * RULE.factor + ORIGIN.x
        """
    _differ(load, text, "Rule(2)", "Rule(3)")
    _differ(load, text, "Point(0, 1)", "Point(0, 2)")


def test_instances_of_classes(load: Load) -> None:
    text = """
        class Rule:
            def __init__(self, factor):
                self.factor = factor
                self.again = self
        RULE = Rule(2)
        def f(x):
            return x * RULE.factor
        """
    _differ(load, text, "Rule(2)", "Rule(3)")


def test_objects_of_libraries_are_the_statement_that_makes_them(load: Load) -> None:
    text = """
        import re
        from decimal import Decimal
        LIMIT = 15
        BOUND = Decimal(LIMIT)
        BOUND += BOUND
        CODE = re.compile("[a-z]")
        UNUSED = Decimal(3)
        def f(x):
            return x > BOUND and CODE.match(x)
        """
    _differ(load, text, "[a-z]", "[a-y]")
    _differ(load, text, "LIMIT = 15", "LIMIT = 16")
    _differ(load, text, "BOUND += BOUND", "BOUND -= BOUND")
    assert digest(load(text).f) == digest(load(text.replace("Decimal(3)", "Decimal(4)")).f)


def test_objects_of_libraries_in_another_module_of_the_users(load: Load) -> None:
    helper = "import re\nCODE = re.compile('a')\n"
    for main in ("import helper\ndef f(x):\n    return helper.CODE.match(x)\n",
                 "from helper import CODE as C\ndef f(x):\n    return C.match(x)\n"):  # fmt: skip
        found = set()
        for pattern in ("'a'", "'b'"):
            load(helper.replace("'a'", pattern), "helper")
            found.add(digest(load(main).f))
        assert len(found) == 2, main


def test_declarations_are_in_the_contract_and_not_in_the_code(load: Load) -> None:
    text = """
        from isthmus.features.definition.spec import Source
        flights = Source("flights", path="a")
        def f(flights):
            return flights
        """
    assert digest(load(text).f) == digest(load(text.replace('"a"', '"b"')).f)


def test_order_of_text_hashes_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").write_text(BASE.replace("(1, 2)", '(frozenset({"p", "q", "r", "s"}), 2)'))
    program = (
        "import definitions; from isthmus.features.definition.codehash import digest; print(digest(definitions.late))"
    )
    found = {
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONHASHSEED": seed}, check=True,
                       capture_output=True).stdout
        for seed in ("1", "2", "3", "4")
    }  # fmt: skip
    assert len(found) == 1


def test_decorators_of_the_function_itself_are_not_its_code(load: Load) -> None:
    text = """
        def declared(ttl):
            return lambda function: function
        @declared(ttl=1)
        def f(x):
            return x
        """
    assert digest(load(text).f) == digest(load(text.replace("ttl=1", "ttl=2")).f)


def test_a_function_without_source_is_an_os_error() -> None:
    namespace: dict[str, Any] = {}
    exec("def f(x):\n    return x\n", namespace)  # noqa: S102
    for function in (namespace["f"], len):
        with pytest.raises(OSError, match=r"."):
            digest(function)


def test_a_compiled_module_counts_by_its_name(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = types.ModuleType("compiled")
    compiled.__file__ = str(tmp_path / "compiled.so")
    Path(compiled.__file__).write_bytes(b"\x7fELF\x80")
    vars(compiled)["limit"] = object()
    monkeypatch.setitem(sys.modules, "compiled", compiled)
    source = "import compiled\n\n\ndef late(flights):\n    return flights + compiled.limit\n"
    assert digest(load(source).late) == digest(load(source).late)


def test_location_names_file_and_line(load: Load) -> None:
    assert location(load(BASE).late) == "definitions.py:19"
    assert location(len) == "len"


PARTS = {
    "a partial of a library's function": ('partial(int, base=2)', "base=2", "base=3"),
    "the function of a partial": ("partial(math.pow, 2)", "math.pow", "math.fmod"),
    "a partial of a partial": ("partial(partial(scaled, n=2), m=3)", "m=3", "m=4"),
    "a partial with an object": ("partial(scaled, n=Decimal(2))", "Decimal(2)", "Decimal(3)"),
    "a lambda": ("lambda x: x + 1", "x + 1", "x + 2"),
    "a bound method": ("Rule(2).apply", "Rule(2)", "Rule(3)"),
    "an object that is called": ("Rule(2)", "x * self", "x - self"),
    "its state": ("Rule(re.compile('a'))", "'a'", "'b'"),
    "a closure": ("made(2)", "made(2)", "made(3)"),
    "an object in a closure": ("made(re.compile('a'))", "'a'", "'b'"),
    "a library's function in a closure": ("made(math.sin)", "math.sin", "math.cos"),
    "a function that wraps another": ("wrapping(scaled, 2)", "scaled, 2", "scaled, 3"),
    "what is wrapped": ("wrapping(scaled, 2)", "x * n", "x - n"),
    "the code that wraps": ("wrapping(scaled, 2)", "+ factor", "- factor"),
    "an item of an enum": ("Mode.FAST", "FAST = 1", "FAST = 3"),
    "an instance of a dataclass": ("Point(2, [math.sin])", "math.sin", "math.cos"),
    "a named tuple with a method": ("Pair(1, 2)", "self.a +", "self.a -"),
    "functions in a dict": ("{'a': scaled, 'b': math.sin}", "math.sin", "math.cos"),
    "objects in a list": ("[re.compile('a'), Decimal(1)]", "Decimal(1)", "Decimal(2)"),
    "the default of a dict": ("defaultdict(lambda: 1)", "lambda: 1", "lambda: 2"),
    "methods in a tuple": ("(Rule(2).apply, str.upper)", "str.upper", "str.lower"),
    "functions in a set": ("{scaled, made, wrapping, math.sin}", "math.sin", "math.cos"),
    "an object with slots in a list": ("[Slotted(2)]", "Slotted(2)", "Slotted(3)"),
    "arrays in a list": ("[np.array([1, 2])]", "[1, 2]", "[1, 3]"),
}  # fmt: skip

OBJECTS = """\
import functools
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np


def scaled(x, n, m=1):
    return x * n * m


def made(n):
    def inner(x):
        return (x, n)

    return inner


def wrapping(function, factor):
    @functools.wraps(function)
    def call(x):
        return function(x, 1) + factor

    return call


class Rule:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def apply(self, x):
        return self(x)


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


class Mode(Enum):
    FAST = 1
    SLOW = 2


@dataclass
class Point:
    x: int
    y: list


class Pair(NamedTuple):
    a: int
    b: int

    def total(self):
        return self.a + self.b


PART = {part}


def f(x):
    return PART, x
"""


@pytest.mark.parametrize("name", PARTS)
def test_objects_of_a_module_are_part_of_the_digest(load: Load, name: str) -> None:
    part, old, new = PARTS[name]
    text = OBJECTS.replace("{part}", part)
    assert text.count(old) == 1, name
    _differ(load, text, old, new)


INDIRECT = {
    "a method of an item of an IntEnum": """
        class Mode(enum.IntEnum):
            FAST = 1
            def rate(self): return N
        MODE = Mode.FAST
        def f(x): return MODE.rate()
    """,
    "an enum made by a call": 'Mode = enum.Enum("Mode", {"FAST": N})\ndef f(x): return Mode.FAST.value',
    "a default of a named tuple": 'Pair = namedtuple("Pair", "a b", defaults=(N,))\ndef f(x): return Pair(1).b',
    "an attribute of a list": """
        class Weights(list):
            def __init__(self, items, scale):
                super().__init__(items)
                self.scale = scale
        WEIGHTS = Weights([1], N)
        def f(x): return WEIGHTS.scale
    """,
    "a deque in a dict": 'LAST = {"a": deque([N])}\ndef f(x): return LAST',
    "a read-only dict in a dict": 'LAST = {"a": types.MappingProxyType({"b": N})}\ndef f(x): return LAST',
    "a dict with a lock": 'LAST = {"a": N, "b": threading.Lock()}\ndef f(x): return LAST',
    "one of two lambdas in a line": "g, h = [lambda x: x + 1, lambda x: x + 2][:: N - 6]\ndef f(x): return g(x)",
    "a wrapper of a function with a decorator": """
        def scaled(factor, function):
            @functools.wraps(function)
            def call(x): return function(x) * factor
            return call
        @functools.partial(scaled, 2)
        def g(x): return x
        h = scaled(N, g)
        def f(x): return h(x)
    """,
    "a function for one type": """
        @functools.singledispatch
        def g(x): return x
        @g.register
        def _(x: int): return x * N
        def f(x): return g(x)
    """,
    "the base of a class of a factory": """
        BASES = {5: type("A", (), {}), 7: type("B", (), {})}
        def made(base):
            class Made(base): pass
            return Made
        Made = made(BASES[N])
        def f(x): return Made
    """,
    **{
        f"{what} of a class of a factory": f"""
            def made(n):
                class Made:
                    {body}
                return Made
            Made = made(N)
            def f(x): return Made
        """
        for what, body in {
            "an attribute": "factor = n",
            "a cached property": "factor = functools.cached_property(lambda self: n)",
            "a cached method": "factor = functools.lru_cache(lambda self: n)",
        }.items()
    },
    "a class in a class of a factory": """
        def made(n):
            class Made:
                class Inner:
                    def factor(self): return n
            return Made
        Made = made(N)
        def f(x): return Made
    """,
    "a star import": "from elsewhere import *\ndef f(x): return PATTERN",
    "an import within a statement": "if True:\n    from elsewhere import PATTERN\ndef f(x): return PATTERN",
}


@pytest.mark.parametrize("name", INDIRECT)
def test_what_a_function_reaches_indirectly_is_part_of_the_digest(load: Load, name: str) -> None:
    imports = "import enum, functools, threading, types\nfrom collections import deque, namedtuple\n"
    text = imports + textwrap.dedent(INDIRECT[name])
    digests = set()
    for number in ("5", "5", "7"):
        load(f"import re\nPATTERN = re.compile('{number}')\n", "elsewhere")
        digests.add(digest(load(re.sub(r"\bN\b", number, text)).f))
    assert len(digests) == 2


def test_the_order_of_the_keywords_of_a_partial_does_not_matter(load: Load) -> None:
    first, second = (OBJECTS.replace("{part}", f"partial(scaled, {text})") for text in ("n=2, m=3", "m=3, n=2"))
    assert digest(load(first).f) == digest(load(second).f)


@pytest.mark.parametrize(
    "cycle",
    [
        "week = functools.partial(math.pow, 2)\ndef f(x): return week(x)\n",
        "RULES = {}\nRULES['all'] = [RULES, 1]\ndef f(x): return RULES\n",
        "RULES = {}\ndef f(x): return RULES['f'](x, 1)\nRULES['f'] = f\n",
        "RULES = [1]\nRULES.append(functools.partial(max, RULES))\ndef f(x): return RULES\n",
        """
class Rule: pass
RULE, OTHER = Rule(), Rule()
RULE.other, OTHER.other = [OTHER], [RULE, 1]
def f(x): return RULE
""",
    ],
)
def test_a_cycle_of_objects_has_an_end(load: Load, cycle: str) -> None:
    text = f"import functools, math\n{cycle}"
    _differ(load, text, "1" if "1" in cycle else "2", "7")


def test_a_wrapper_of_the_function_itself_is_its_code_without_the_declaration(load: Load) -> None:
    text = """
        import functools
        def declared(ttl):
            return lambda function: function
        def scaled(factor):
            def decorate(function):
                @functools.wraps(function)
                def call(x):
                    return function(x) * factor
                return call
            return decorate
        @declared(ttl=1)
        @scaled(2)
        def f(x):
            return x + 1
        """
    _differ(load, text, "@scaled(2)", "@scaled(3)")
    _differ(load, text, "x + 1", "x + 2")
    assert digest(load(text).f) == digest(load(text.replace("ttl=1", "ttl=2")).f)


def test_an_object_without_a_state_is_refused_by_its_name(load: Load) -> None:
    text = "import threading\ndef made(guard):\n    def f(x):\n        return x, guard\n    return f\n"
    with pytest.raises(OSError, match=r"^guard: a lock has no state.*make it inside the function"):
        digest(load(text + "f = made(threading.Lock())\n").f)
    deep = "DEEP = []\nfor _ in range(9999):\n    DEEP = [DEEP]\ndef f(x): return DEEP\n"
    with pytest.raises(OSError, match=r"nested too deeply"):
        digest(load(deep).f)


_SERVE = """
import sys
from isthmus.features.definition.codehash import digest
import importlib.util
for line in sys.stdin:
    spec = importlib.util.spec_from_file_location("definitions", line.strip())
    module = sys.modules["definitions"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(digest(module.f), flush=True)
"""
_EXPRESSIONS = strategies.recursive(
    strategies.sampled_from([part for part, _, _ in PARTS.values()]) | strategies.text("abc", max_size=2).map(repr),
    lambda inner: (
        strategies.lists(inner, min_size=1, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | strategies.lists(inner, min_size=1, max_size=3).map(lambda parts: f"dict(enumerate(({', '.join(parts)},)))")
        | inner.map(lambda part: f"made({part})")
        | inner.map(lambda part: f"Rule({part})")
        | inner.map(lambda part: f"partial(scaled, n={part}, m=frozenset({{'p', 'q', scaled, made, Rule}}))")
    ),
    max_leaves=4,
)


def test_two_processes_have_the_same_digest(tmp_path: Path) -> None:
    count = itertools.count()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
            )
            for seed in ("1", "2")
        ]  # fmt: skip

        @given(_EXPRESSIONS)
        def agree(expression: str) -> None:
            file = tmp_path / f"{next(count)}.py"
            file.write_text(OBJECTS.replace("{part}", f"({expression})"))
            found = set()
            for server in servers:
                assert server.stdin
                assert server.stdout
                server.stdin.write(f"{file}\n")
                server.stdin.flush()
                found.add(server.stdout.readline())
            assert len(found) == 1
            assert found != {""}

        agree()


_LIBRARY = """\
VERSION = {version}
class Table:
    def __call__(self, x): return x
read = Table()
def endless(x):
    return x + {version}
"""
_DEFINITIONS = """\
import parts.table
from parts.table import Table, endless, read
TABLE = [Table, endless]
def f(x):
    import parts.other
    return endless(read(x)), TABLE, parts.table.VERSION, parts.other
"""


def _install(folder: Path, version: int, *, record: bool = True) -> Path:
    """Puts a distribution into a folder as `pip install --target` does."""
    (folder / "parts").mkdir(parents=True)
    for name in ("__init__", "table", "other"):
        (folder / "parts" / f"{name}.py").write_text(_LIBRARY.format(version=version) if name == "table" else "")
    about = folder / "parts-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    lines = [f"parts/{name}.py,sha256=x,1\n" for name in ("__init__", "table", "other")]
    (about / "RECORD").write_text("".join(lines) if record else "parts.pth,,\n")
    return folder


def _elsewhere(tmp_path: Path, *paths: Path) -> str:
    (tmp_path / "definitions.py").write_text(_DEFINITIONS)
    program = (
        "import definitions; from isthmus.features.definition.codehash import digest; print(digest(definitions.f))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tmp_path, *paths]))}
    return subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True,
                          capture_output=True, text=True).stdout  # fmt: skip


def test_the_place_of_a_library_does_not_matter(tmp_path: Path) -> None:
    """As `pip install --target` leaves it, linked, in an archive, compiled, in a layer, and beside the user's code."""
    target = _install(tmp_path / "target", 1)
    linked, cached, layer = tmp_path / "linked", tmp_path / "cached", tmp_path / "opt" / "site-packages"
    shutil.copytree(target, linked)
    (linked / "parts").rename(cached)
    (linked / "parts").symlink_to(cached)
    archive = Path(shutil.make_archive(str(tmp_path / "libraries"), "zip", target))
    shutil.copytree(target / "parts", layer / "parts")  # a layer often has no metadata
    compiled = shutil.copytree(target, tmp_path / "compiled")
    compileall.compile_dir(compiled, legacy=True, quiet=1)
    for source in compiled.rglob("*.py"):
        source.unlink()
    shutil.rmtree(compiled / "parts" / "__pycache__", ignore_errors=True)
    found = {place: _elsewhere(tmp_path, place) for place in (target, linked, archive, layer, compiled)}
    assert len({*found.values()}) == 1, found
    changed = _install(tmp_path / "changed", 2)
    assert _elsewhere(tmp_path, changed) == found[target]
    _install(tmp_path / "beside", 1)
    shutil.copytree(tmp_path / "beside", tmp_path, dirs_exist_ok=True)
    assert _elsewhere(tmp_path) == found[target]


def test_a_distribution_that_is_installed_to_be_edited_is_the_users(tmp_path: Path) -> None:
    first, second = (_install(tmp_path / f"edited_{n}", n, record=False) for n in (1, 2))
    assert _elsewhere(tmp_path, first) != _elsewhere(tmp_path, second)


@pytest.mark.accept
def test_the_place_of_pyspark_does_not_matter(tmp_path: Path) -> None:
    """As `pip install --target` leaves it: without its JAR files, which the definitions do not need."""
    spark = metadata.distribution("pyspark")
    installed, target = Path(str(spark.locate_file("pyspark"))), tmp_path / "target"
    shutil.copytree(installed, target / "pyspark", ignore=shutil.ignore_patterns("jars", "__pycache__"))
    about = next(installed.parent.glob("pyspark-*.dist-info"))
    shutil.copytree(about, target / about.name)
    program = """
import pathlib, pyspark
from isthmus.orchestration.project import Project
print(Project(pathlib.Path("examples/flights")).definitions.contract.hash, pathlib.Path(pyspark.__file__).parents[1])
"""
    found = []
    for paths in ({}, {"PYTHONPATH": str(target)}):
        done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True, timeout=120,
                              env={**os.environ, **paths}, capture_output=True, text=True)  # fmt: skip
        found.append(done.stdout.split())
    assert found[0][0] == found[1][0]
    assert found[1][1] == str(target)
