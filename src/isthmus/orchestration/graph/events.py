"""What a step is asked to do and what it reports: plain data, whichever process runs it."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

Metadata = dict[str, Any]
"""Name to a number or text, or to {"type": ..., "raw_value": ...} as Dagster Pipes writes it."""
DRIFT = "resembles_its_training"
"""The check that blocks nothing: when it fails, the model is due for training."""
FAILED = "failed"
"""Name of the Pipes message that carries a `Failed`."""


class Request(msgspec.Struct, frozen=True):
    """What to do of a step.

    Attributes:
        step: its name.
        nodes: which of its nodes to materialize.
        checks: node and name of each check to run.
        days: first day, and the day after the last; None for a step without days.
        everything: whether `days` are all the days of the project.
    """

    step: str
    nodes: tuple[str, ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    days: tuple[str, str] | None = None
    everything: bool = False


@dataclass(frozen=True)
class Materialized:
    """A node was materialized.

    Attributes:
        node: its id.
        version: of its content.
        metadata: what Dagster shows with it.
    """

    node: str
    version: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """A check was run.

    Attributes:
        node: what it is about.
        check: its name.
        passed: whether it passed.
        message: why it failed.
        metadata: what Dagster shows with it.
        blocking: whether a failure holds up everything downstream.
    """

    node: str
    check: str
    passed: bool
    message: str = ""
    metadata: Metadata = field(default_factory=dict)
    blocking: bool = True


class Failed(msgspec.Struct, frozen=True):
    """Why a step failed.

    Attributes:
        sentence: for people.
        passes: whether a retry may succeed.
    """

    sentence: str
    passes: bool = False
