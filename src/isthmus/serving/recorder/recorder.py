"""Record answers with limited memory: the event loop converts them to columns, which a thread writes to disk."""

import asyncio
import os
import platform
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.values.columns import Values
from isthmus.serving import log
from isthmus.serving.recorder.batch import AnswerBatch, AnswerGroup, encoded, merged
from isthmus.serving.recorder.columns import AnswerReader, Lookups, RecordedAnswer, stored_entries, to_groups
from isthmus.serving.recorder.options import MB, Recording
from isthmus.serving.recorder.spool import Spool

ANSWER = "isthmus.answer"
"""Key in a request's scope for the answer to record."""

HEADER = b"isthmus-answer"

ANSWERS = 4096
"""Answers per batch. Large batches are rare, so the thread seldom takes the interpreter from the event loop."""
PART = 32
"""Answers encoded together: lookups on the event loop, others in the thread, which pauses in between."""
PAUSE = 0.0005
"""Seconds of that pause."""
MANY = 100
"""Rows of an answer that is encoded at once, without waiting for more answers."""
BYTES = 1 << 20
"""Maximum bytes of a batch; half of `memory_mb` if that is less."""
SECONDS = 0.5
"""Longest time that an answer waits for its batch."""

READERS = 1024
"""Number of plans whose readers are cached."""

NOTHING: Mapping[str, Any] = {}

_LATE = 5.0
"""Seconds that a closing server waits for the disk."""


class _Pending:
    def __init__(self) -> None:
        self.lookups: dict[int, Lookups] = {}
        self.left: list[RecordedAnswer] = []
        self.callers: dict[str, int] = {}
        self.answers = self.size = 0

    def add(self, part: Sequence[RecordedAnswer]) -> None:
        by_reader: dict[int, list[RecordedAnswer]] = {}
        for answer in part:
            reader = answer.reader
            if reader.plain and not answer.inputs:
                by_reader.setdefault(id(reader), []).append(answer)
            else:
                # Digests and keyed hashes are slow, so leave them to the thread.
                self.left.append(answer)
                self.size += len(answer.body) + answer.size + answer.rows * reader.row
        self.answers += len(part)
        for known, answers in by_reader.items():
            lookups = self.lookups.get(known)
            if lookups is None:
                lookups = self.lookups[known] = Lookups(answers[0].reader)
            self.size += lookups.add(answers, self.callers)

    def groups(self, secret: bytes) -> list[AnswerGroup]:
        groups = [lookups.group() for lookups in self.lookups.values()]
        left: list[AnswerGroup] = []
        for start in range(0, len(self.left), PART):
            if start:
                time.sleep(PAUSE)
            left += to_groups(self.left[start : start + PART], secret, self.callers)
        return groups + merged(left)


class Recorder:
    """Record the answers of a server process in files, without blocking the event loop.

    The constructor starts the thread that writes to `folder`, and `close` ends it. Call all other methods on the event
    loop. `written` and `dropped` are callbacks that take a number of answers. The thread may call them too. `dropped`
    takes the reason first: "memory", "disk" or "defect".
    """

    def __init__(
        self, options: Recording, folder: Path, secret: bytes, written: Callable[[int], None],
        dropped: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._options, self._secret = options, secret
        self._all = options.share == 1
        self._spool = Spool(folder, int(options.spool_mb * MB), options.full)
        self._run = self._spool.run.encode()
        self._count_written, self._count_dropped = written, dropped
        self._readers: dict[LookupPlan, AnswerReader] = {}
        self._sequence = self._number = 0
        # By place. The event loop changes only "memory" and the thread never does, so no lock is needed.
        self._dropped: dict[str, int] = {"memory": 0, "disk": 0, "defect": 0}
        self._part: list[RecordedAnswer] = []
        self._pending = _Pending()
        self._timer: asyncio.TimerHandle | None = None
        # `_in` changes only on the event loop and `_out` only in the thread, so no lock is needed.
        self._waiting: deque[tuple[int, _Pending]] = deque()
        self._in, self._out = 0, 0
        self._most = int(options.memory_mb * MB)
        # A batch larger than that would never fit.
        self._bytes = min(BYTES, self._most // 2)
        self._wake, self._ending = threading.Event(), False
        self._failed = self._behind = False
        self._runtime = runtime()
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def reader(self, route: str, plan: LookupPlan, package: str = "", variant: str = "") -> AnswerReader | None:
        """Return the `AnswerReader` that converts an answer for recording, or None to not record this answer.

        Returns None at random if the settings record only a share of the answers. `route` is "lookup", "predict",
        "infer" or "generate". `package` is the digest of the model's package, and `variant` its precision and threads,
        such as "int8/1". Both are empty for a lookup. The cache uses only `plan` as its key, so always pass the same
        other arguments with a plan.
        """
        options = self._options
        if options.share < 1 and random.random() >= options.share:  # noqa: S311 - a sample
            return None
        reader = self._readers.get(plan)
        if reader is None:
            if len(self._readers) >= READERS:
                self._readers.clear()
            reader = self._readers[plan] = AnswerReader.of(route, plan, package, variant, options.private)
        return reader

    def lookup(  # noqa: PLR0913 - everything the answer used
        self, plan: LookupPlan, at: int, body: bytes, keys: Mapping[str, Sequence[Any]], rows: int,
        answers: Mapping[str, ViewAnswer], computed: Mapping[str, Mapping[str, Values]],
    ) -> RecordedAnswer | None:  # fmt: skip
        reader = self._readers.get(plan) if self._all else None
        if reader is None and (reader := self.reader("lookup", plan)) is None:
            return None
        # Drop the keys unless they will be hashed, to free their memory.
        return RecordedAnswer(
            reader, at, body, keys if reader.private else NOTHING, stored_entries(reader, answers), rows, None, computed
        )

    def identity(self, answer: RecordedAnswer) -> bytes:
        self._sequence = answer.sequence = self._sequence + 1
        return b"%s-%x" % (self._run, answer.sequence)

    def add(self, answer: RecordedAnswer) -> None:
        """Queue an answer, which a thread writes to disk in a batch with others, within about half a second.

        If memory or disk is full, drops the new or the oldest answers, as configured, and counts them. Raises no error.
        """
        part = self._part
        part.append(answer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self._hand_over)
        # Most answers stop here; every `PART` answers pay for encoding.
        if len(part) >= PART or answer.rows > MANY or answer.size:
            self._part, pending = [], self._pending
            pending.add(part)
            if pending.answers >= ANSWERS or pending.size >= self._bytes:
                self._hand_over()

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending = self._pending
        pending.add(self._part)
        if not pending.answers:
            return
        # A missing number shows the collector that a batch was dropped.
        self._number += 1
        self._pending, self._part = _Pending(), []
        if self._in == self._out:
            self._behind = False
        if self._options.full == "oldest":
            while self._in - self._out + pending.size > self._most:
                try:
                    _, old = self._waiting.popleft()
                except IndexError:
                    break
                self._in -= old.size
                self._drop_from_memory(old)
        if self._in - self._out + pending.size > self._most:
            self._drop_from_memory(pending)
            return
        self._in += pending.size
        self._waiting.append((self._number, pending))
        self._wake.set()

    def close(self) -> None:
        """Write the queued answers to disk and end the thread, when the server stops.

        Waits at most 5 seconds. Answers that are not written by then may be lost.
        """
        self._hand_over()
        self._ending = True
        self._wake.set()
        self._thread.join(_LATE)

    def _drop_from_memory(self, pending: _Pending) -> None:
        self._drop("memory", pending.answers)
        if not self._behind:
            problem = f"the disk is too slow: {self._options.memory_mb:g} MB wait for it"
            log.warning("answers are not recorded", problem=problem)
        self._behind = True

    def _drop(self, why: str, answers: int) -> None:
        self._dropped[why] += answers
        self._count_dropped(why, answers)

    def _write(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._waiting:
                try:
                    number, pending = self._waiting.popleft()
                except IndexError:
                    break
                try:
                    self._write_batch(number, pending)
                finally:
                    self._out += pending.size
            if self._ending and not self._waiting:
                self._spool.close()
                return

    def _write_batch(self, number: int, pending: "_Pending") -> None:
        try:
            groups = tuple(pending.groups(self._secret))
            now = time.time_ns() // 1000
            batch = AnswerBatch(
                self._spool.run, number, now, sum(self._dropped.values()), self._runtime, tuple(pending.callers), groups
            )
            removed = self._spool.write(encoded(batch))
        except Exception as error:  # noqa: BLE001 - requests must go on after any error
            self._drop("disk" if isinstance(error, OSError) else "defect", pending.answers)
            if not self._failed:
                problem = str(error) if isinstance(error, OSError) else type(error).__name__
                log.warning("answers are not recorded", problem=problem, at=log.place(error))
            self._failed = True
            return
        self._failed = False
        self._count_written(pending.answers)
        if removed:
            self._drop("disk", removed)


def runtime() -> str:
    # The last bits of a model's outputs may depend on these versions and on the processor.
    # tokenizers is installed only where text is generated, and one of the builds of ONNX Runtime.
    versions = ((name, _version(name)) for name in ("isthmus", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers"))
    return " ".join([*(f"{name} {number}" for name, number in versions if number), _processor()])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123 - a file of the kernel
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else f"{platform.machine()} {os.uname().sysname}"
