"""What runs the steps of a project for Dagster."""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Protocol

import dagster as dg
import msgspec
from dagster import PipesSubprocessClient
from dagster._core.errors import DagsterPipesExecutionError
from dagster._core.pipes.context import PipesMessageHandler
from dagster_pipes import PipesDefaultMessageWriter

from isthmus.orchestration.graph.events import FAILED, Failed, Request

Context = dg.AssetExecutionContext | dg.AssetCheckExecutionContext
Results = Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]
CHILD = ("-P", "-m", "isthmus.orchestration.graph.child")
_PAUSE = 0.01
"""Seconds between two looks for messages."""
RETRIES, WAIT = 3, 10
"""How often to retry what may pass, and the seconds before the first retry; they double each time."""


class Steps(Protocol):
    """What runs steps."""

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results:
        """Runs the selected part of a step, and yields the results."""


class Messages(dg.PipesMessageReader):
    """Reads what the process of a step sends, from a temporary file, to the last line.

    Dagster's own reader asks whether the process has ended after it has found no more, and so loses what was written in
    between: on a busy machine a step that was done had failed.
    """

    @contextmanager
    def read_messages(self, handler: PipesMessageHandler) -> Iterator[dict[str, Any]]:
        """Hands on the messages while the block runs, and those that are left at its end."""
        with TemporaryDirectory(prefix="isthmus-pipes-") as folder:
            file, ended = Path(folder) / "messages", Event()
            file.touch()

            def read() -> None:
                try:
                    for line in lines(file, ended.is_set):
                        handler.handle_message(json.loads(line))
                except Exception:
                    handler.report_pipes_framework_exception("reader of a step's messages", sys.exc_info())
                    raise

            reading = Thread(target=read, daemon=True)
            reading.start()
            try:
                yield {PipesDefaultMessageWriter.FILE_PATH_KEY: str(file)}
            finally:
                ended.set()
                reading.join()

    def no_messages_debug_text(self) -> str:
        """For Dagster's message about a process that has said nothing."""
        return "Its messages were read from a temporary file."


def lines(file: Path, ended: Callable[[], bool]) -> Iterator[str]:
    """The lines of a file that grows, each once it is whole, until it has ended."""
    with file.open(encoding="utf-8") as grows:
        part = ""
        while True:
            # Asked before the last look: afterward nothing comes that it has not seen.
            last = ended()
            for line in grows:
                part += line
                if part.endswith("\n"):
                    yield part
                    part = ""
            if last:
                return
            time.sleep(_PAUSE)


class IsthmusResource(dg.ConfigurableResource[Any]):
    """Runs steps of a project, each only for the nodes and checks that the run has selected.

    Each step is its own process, connected by Dagster Pipes: it receives a request, and sends back its log, its
    progress and its results. Dagster's own process loads neither feast nor pyspark nor torch. To run steps elsewhere,
    override `launch` with another Pipes client. `project` is the folder.
    """

    project: str

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results:
        """Runs the selected part of a step, whose `nodes` are ids by asset key, and yields the results.

        Raises:
            Failure: with a sentence that says why.
            RetryRequested: something it needs is unavailable, and may be back later.
        """
        extras = {
            "root": str(Path(self.project).resolve()),
            "asked": msgspec.to_builtins(selection(context, step, nodes)),
            "keys": {node: key.to_user_string() for key, node in nodes.items()},
        }
        try:
            with warnings.catch_warnings():
                # Dagster's own clients use a preview feature and warn about it.
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
        """Starts the process of a step, and waits until it ends."""
        client = PipesSubprocessClient(message_reader=Messages(), termination_timeout_seconds=60)
        # By its number, a step that is still starting up sees that this process has been killed.
        command = [sys.executable, *CHILD, str(os.getpid())]
        return client.run(context=context.op_execution_context, extras=extras, command=command)


def selection(context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Request:
    """What the run has selected of a step, in the order of the project."""
    order = list(nodes.values())
    if isinstance(context, dg.AssetCheckExecutionContext):
        checks = [(nodes[check.asset_key], check.name) for check in context.selected_asset_check_keys]
        return Request(step, checks=tuple(sorted(checks, key=lambda check: (order.index(check[0]), check[1]))))
    selected = tuple(sorted((nodes[key] for key in context.selected_asset_keys), key=order.index))
    if not context.has_partition_key_range and not context.has_partition_key:
        return Request(step, selected)
    window, partitions = context.partition_time_window, context.assets_def.partitions_def
    ends = (context.partition_key_range.start, context.partition_key_range.end)
    everything = partitions is not None and ends == (
        partitions.get_first_partition_key(),
        partitions.get_last_partition_key(),
    )
    return Request(step, selected, days=(_day(window.start), _day(window.end)), everything=everything)


def _day(at: datetime) -> str:
    return at.date().isoformat()
