"""Dagster resource that runs the steps of a project in separate processes. `Messages` reads what they report."""

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

from isthmus.orchestration.steps.step import FAILED, StepFailure, StepRequest

Context = dg.AssetExecutionContext | dg.AssetCheckExecutionContext
Results = Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]
CHILD = ("-P", "-m", "isthmus.orchestration.graph.child")
SHARE = "isthmus/share"  # tag of an op that does a share of a step for a model: index, number and name
_PAUSE = 0.01  # seconds between two reads of the message file
RETRIES, WAIT = 3, 10  # retries of a temporary failure, and seconds before the first; the wait doubles each time


class StepRunner(Protocol):
    """Runs the part of a step that a Dagster context selects; `nodes` are node ids by asset key."""

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results: ...


class Messages(dg.PipesMessageReader):
    """Reader of all messages of a step's process from a file; Dagster's own file reader can lose the last ones."""

    @contextmanager
    def read_messages(self, handler: PipesMessageHandler) -> Iterator[dict[str, Any]]:
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
        return "Its messages were read from a temporary file."


def lines(file: Path, ended: Callable[[], bool]) -> Iterator[str]:
    with file.open(encoding="utf-8") as stream:
        part = ""
        while True:
            # Check for the end before the last read, so that the read sees everything written until then.
            last = ended()
            for line in stream:
                part += line
                if part.endswith("\n"):
                    yield part
                    part = ""
            if last:
                return
            time.sleep(_PAUSE)


class IsthmusResource(dg.ConfigurableResource[Any]):
    """Runs the steps of a project in separate processes, for the nodes and checks selected in Dagster.

    The process of a step is connected by Dagster Pipes: it receives a request and sends back logs, progress and
    results. Dagster's process loads neither feast nor pyspark nor torch. To run steps elsewhere, for example in a pod,
    override `launch` with another Pipes client.

    Attributes:
        project: folder of the project.
    """

    project: str

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results:
        """Run the selected part of a step in a separate process, and yield its results after the process has ended.

        Dagster's ops call it. `context` is the context of the op and tells which assets, checks and days are selected.
        `step` is the name of the step. `nodes` maps asset keys to node ids, such as "offline/customer". If the step
        fails, the results of the finished nodes are yielded before the error.

        Raises:
            Failure: the step failed. Dagster does not retry it. After a crash of the process, no results are yielded.
            RetryRequested: a dependency, such as Redis, is temporarily unavailable. Dagster retries the step three
                times, after 10, 20 and 40 seconds.
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
                f"the process of step {step} was killed or crashed ({error}). Finished work is saved: see the stderr "
                "of the run, then run it again. A kill without a message often means out of memory",
                allow_retries=False,
            ) from None
        yield from invocation.get_results(implicit_materializations=False)
        for message in invocation.get_custom_messages():
            failed = msgspec.convert(message[FAILED], StepFailure)
            if failed.passes:
                context.log.warning(failed.sentence)
                wait = WAIT * 2**context.op_execution_context.retry_number
                raise dg.RetryRequested(max_retries=RETRIES, seconds_to_wait=wait) from dg.Failure(failed.sentence)
            raise dg.Failure(failed.sentence, allow_retries=False)

    def launch(self, context: Context, extras: dict[str, Any]) -> dg.PipesClientCompletedInvocation:
        """Start the process of a step and wait until it ends. Override it to run steps elsewhere, as in a container.

        `extras` has the request and other data that Dagster Pipes passes to the process. If the Dagster run is
        canceled, the process has 60 seconds to end before it is killed. Raise Dagster's DagsterPipesExecutionError if
        the exit code is not 0.
        """
        client = PipesSubprocessClient(message_reader=Messages(), termination_timeout_seconds=60)
        # The step exits if the process with this pid is gone, even if that happens while the step starts.
        command = [sys.executable, *CHILD, str(os.getpid())]
        return client.run(context=context.op_execution_context, extras=extras, command=command)


def selection(context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> StepRequest:
    if share := context.op_execution_context.op_def.tags.get(SHARE):
        index, count, model = share.split("/", 2)
        return StepRequest(step, share=(model, int(index), int(count)))
    order = list(nodes.values())
    if isinstance(context, dg.AssetCheckExecutionContext):
        checks = [(nodes[check.asset_key], check.name) for check in context.selected_asset_check_keys]
        return StepRequest(step, checks=tuple(sorted(checks, key=lambda check: (order.index(check[0]), check[1]))))
    selected = tuple(sorted((nodes[key] for key in context.selected_asset_keys), key=order.index))
    if not context.has_partition_key_range and not context.has_partition_key:
        return StepRequest(step, selected)
    window, partitions = context.partition_time_window, context.assets_def.partitions_def
    ends = (context.partition_key_range.start, context.partition_key_range.end)
    everything = partitions is not None and ends == (
        partitions.get_first_partition_key(),
        partitions.get_last_partition_key(),
    )
    return StepRequest(step, selected, days=(_day(window.start), _day(window.end)), everything=everything)


def _day(at: datetime) -> str:
    return at.date().isoformat()
