"""What a step is asked for, and what it tells: plain data, for whatever runs it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

Metadata = dict[str, Any]
"""Name to a number or a text as it is, or to {"type": ..., "raw_value": ...} as Dagster Pipes has it."""
Progress = Callable[[str, float], None]
DRIFT = "resembles_its_training"
"""The check that stops nothing: it asks for a new training."""
FAILED = "failed"
"""A message of this name says how a step ended that did not do what it was asked for."""


class Asked(msgspec.Struct, frozen=True):
    """What is asked of a step.

    Attributes:
        step: its name.
        nodes: those to make, of the several that it can make.
        checks: node and name of those to make.
        days: first day and the day after the last one; None for a step without days.
        everything: whether these are all days that there are.
    """

    step: str
    nodes: tuple[str, ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    days: tuple[str, str] | None = None
    everything: bool = False


@dataclass(frozen=True)
class Made:
    """A node that has been made.

    Attributes:
        node: which.
        version: of its content.
        metadata: what is shown of it.
    """

    node: str
    version: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """A check that has been made.

    Attributes:
        node: what was checked.
        check: its name.
        passed: whether it did.
        found: in words, if it did not.
        metadata: what is shown of it.
        blocking: whether what depends on the node must wait.
    """

    node: str
    check: str
    passed: bool
    found: str = ""
    metadata: Metadata = field(default_factory=dict)
    blocking: bool = True


class Failed(msgspec.Struct, frozen=True):
    """How a step ended.

    Attributes:
        sentence: what is said of it.
        passes: whether it may be enough to wait and to try again.
    """

    sentence: str
    passes: bool = False
