"""What runs the steps of a project for Dagster."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import dagster as dg
import msgspec
from dagster import PipesSubprocessClient
from dagster._core.errors import DagsterPipesExecutionError

from isthmus.orchestration.graph.events import FAILED, Asked, Failed

Context = dg.AssetExecutionContext | dg.AssetCheckExecutionContext
Results = Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]
CHILD = ("-P", "-m", "isthmus.orchestration.graph.child")
RETRIES, WAIT = 3, 10
"""How often what may pass is tried again, and after how many seconds at first; then after twice as many."""


class Steps(Protocol):
    """What runs steps."""

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results:
        """Does what of a step is selected, and gives the results."""


class IsthmusResource(dg.ConfigurableResource[Any]):
    """Runs steps of a project: of what a step can make, what the run has selected.

    Each step is a process of its own, which is told by Dagster Pipes what to do, and tells its log, its progress and
    what it made. Dagster's own process loads neither feast nor pyspark nor torch. To run them elsewhere, override
    `launch` with another Pipes client.

    Attributes:
        project: folder of the project.
    """

    project: str

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results:
        """Does what of a step is selected, and gives the results.

        Args:
            context: of the asset or of the check.
            step: its name.
            nodes: the project's nodes by their asset keys.

        Raises:
            Failure: in one sentence why it could not be done.
            RetryRequested: what it needs was not there, and may be later.
        """
        extras = {
            "root": str(Path(self.project).resolve()),
            "asked": msgspec.to_builtins(asked(context, step, nodes)),
            "keys": {node: key.to_user_string() for key, node in nodes.items()},
        }
        try:
            with warnings.catch_warnings():
                # Dagster warns of a preview that its own clients use.
                warnings.simplefilter("ignore", dg.PreviewWarning)
                invocation = self.launch(context, extras)
        except DagsterPipesExecutionError as error:
            raise dg.Failure(
                f"the process of step {step} was killed, or has a defect ({error}). What was finished stays: see the "
                "stderr of the run, and run it again. What is killed without a word often lacked memory",
                allow_retries=False,
            ) from None
        yield from invocation.get_results(implicit_materializations=False)
        for message in invocation.get_custom_messages():
            failed = msgspec.convert(message[FAILED], Failed)
            if failed.passes:
                context.log.warning(failed.sentence)
                wait = WAIT * 2**context.op_execution_context.retry_number
                raise dg.RetryRequested(max_retries=RETRIES, seconds_to_wait=wait) from dg.Failure(failed.sentence)
            raise dg.Failure(failed.sentence, allow_retries=False)

    def launch(self, context: Context, extras: dict[str, Any]) -> dg.PipesClientCompletedInvocation:
        """Starts the process of a step, and waits for its end."""
        client = PipesSubprocessClient(termination_timeout_seconds=60)
        return client.run(context=context.op_execution_context, extras=extras, command=[sys.executable, *CHILD])


def asked(context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Asked:
    """What the run has selected of a step, in the order in which the project has it."""
    order = list(nodes.values())
    if isinstance(context, dg.AssetCheckExecutionContext):
        checks = [(nodes[check.asset_key], check.name) for check in context.selected_asset_check_keys]
        return Asked(step, checks=tuple(sorted(checks, key=lambda one: (order.index(one[0]), one[1]))))
    made = tuple(sorted((nodes[key] for key in context.selected_asset_keys), key=order.index))
    if not context.has_partition_key_range and not context.has_partition_key:
        return Asked(step, made)
    window, whole = context.partition_time_window, context.assets_def.partitions_def
    chosen = (context.partition_key_range.start, context.partition_key_range.end)
    everything = whole is not None and chosen == (whole.get_first_partition_key(), whole.get_last_partition_key())
    return Asked(step, made, days=(_day(window.start), _day(window.end)), everything=everything)


def _day(at: datetime) -> str:
    return at.date().isoformat()
