"""The recorder: answers become columns on the event loop, which a thread joins and writes.

What waits for the disk is bounded: whole batches are dropped beyond that, and counted.
"""

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
from isthmus.serving.recorder.batch import Batch, Group, encoded, merged
from isthmus.serving.recorder.columns import Answer, Reader, grouped, stored_of
from isthmus.serving.recorder.lookups import Lookups
from isthmus.serving.recorder.options import MB, Recording
from isthmus.serving.recorder.spool import Spool

ANSWER = "isthmus.answer"
"""The key in a request's scope for its answer, if it is to be recorded."""

HEADER = b"isthmus-answer"

ANSWERS = 4096
"""Of a batch. A thread that needs the interpreter has the event loop wait: seldom, and for little."""
PART = 32
"""Answers that are encoded together: lookups on the event loop, others in the thread, which then lets the loop run."""
PAUSE = 0.0005
"""Seconds for that."""
MANY = 100
"""Rows of an answer that waits for no others."""
BYTES = 1 << 20
"""Of a batch, or half of `memory_mb` if that is less."""
SECONDS = 0.5
"""How long an answer waits for others."""

READERS = 1024
"""Plans whose readers are kept."""

NOTHING: Mapping[str, Any] = {}

_LATE = 5.0
"""Seconds that the end of a server waits for the disk."""


class _Pending:
    """A batch that grows: columns of lookups, and the answers that are left to the thread."""

    def __init__(self) -> None:
        self.lookups: dict[int, Lookups] = {}
        self.left: list[Answer] = []
        self.callers: dict[str, int] = {}
        self.answers = self.size = 0

    def add(self, part: Sequence[Answer]) -> None:
        """Adds answers."""
        by_reader: dict[int, list[Answer]] = {}
        for answer in part:
            reader = answer.reader
            if reader.plain and not answer.inputs:
                by_reader.setdefault(id(reader), []).append(answer)
            else:
                # Digests and keyed hashes take longer.
                self.left.append(answer)
                self.size += len(answer.body) + answer.size + answer.rows * reader.row
        self.answers += len(part)
        for known, answers in by_reader.items():
            lookups = self.lookups.get(known)
            if lookups is None:
                lookups = self.lookups[known] = Lookups(answers[0].reader)
            self.size += lookups.add(answers, self.callers)

    def groups(self, secret: bytes) -> list[Group]:
        """All answers as they are written."""
        groups = [lookups.group() for lookups in self.lookups.values()]
        left: list[Group] = []
        for start in range(0, len(self.left), PART):
            if start:
                time.sleep(PAUSE)
            left += grouped(self.left[start : start + PART], secret, self.callers)
        return groups + merged(left)


class Recorder:
    """The recorder of a server process. `dropped` and `written` are called with numbers of answers."""

    def __init__(
        self, options: Recording, folder: Path, secret: bytes, written: Callable[[int], None],
        dropped: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._options, self._secret = options, secret
        self._all = options.share == 1
        self._spool = Spool(folder, int(options.spool_mb * MB), options.full)
        self._run = self._spool.run.encode()
        self._count_written, self._count_dropped = written, dropped
        self._readers: dict[LookupPlan, Reader] = {}
        self._sequence = self._number = 0
        # By where they were dropped: the event loop drops from memory alone, the thread never.
        self._dropped: dict[str, int] = {"memory": 0, "disk": 0, "defect": 0}
        self._part: list[Answer] = []
        self._pending = _Pending()
        self._timer: asyncio.TimerHandle | None = None
        # Each is changed on one side alone: no lock.
        self._waiting: deque[tuple[int, _Pending]] = deque()
        self._in, self._out = 0, 0
        self._most = int(options.memory_mb * MB)
        # Else none would have room, whatever the disk does.
        self._bytes = min(BYTES, self._most // 2)
        self._wake, self._ending = threading.Event(), False
        self._failed = self._behind = False
        self._runtime = runtime()
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def reader(self, route: str, plan: LookupPlan, package: str = "", variant: str = "") -> Reader | None:
        """The reader of an answer that is to be recorded; None if it is not one of the sample.

        The plan stands for all requests like this one.
        """
        options = self._options
        if options.share < 1 and random.random() >= options.share:  # noqa: S311 - a sample
            return None
        known = self._readers.get(plan)
        if known is None:
            if len(self._readers) > READERS:
                self._readers.clear()
            known = self._readers[plan] = Reader.of(route, plan, package, variant, options.private)
        return known

    def lookup(  # noqa: PLR0913 - what an answer rested on
        self, plan: LookupPlan, at: int, body: bytes, keys: Mapping[str, Sequence[Any]], rows: int,
        answers: Mapping[str, ViewAnswer], computed: Mapping[str, Mapping[str, Values]],
    ) -> Answer | None:  # fmt: skip
        """The answer to a lookup, if it is to be recorded."""
        reader = self._readers.get(plan) if self._all else None
        if reader is None and (reader := self.reader("lookup", plan)) is None:
            return None
        # The keys of most are not needed again, and would stay in memory for a while.
        return Answer(
            reader, at, body, keys if reader.private else NOTHING, stored_of(reader, answers), rows, None, computed
        )

    def identity(self, answer: Answer) -> bytes:
        """The id that the answer carries."""
        self._sequence = answer.sequence = self._sequence + 1
        return b"%s-%x" % (self._run, answer.sequence)

    def add(self, answer: Answer) -> None:
        """Has an answer written."""
        part = self._part
        part.append(answer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self._hand_over)
        # Most answers pay for no more than this.
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
        # Whoever collects sees by its number that a batch is missing.
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
        """Writes what waits, for a while."""
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
            batch = Batch(
                self._spool.run, number, now, sum(self._dropped.values()), self._runtime, tuple(pending.callers), groups
            )
            removed = self._spool.write(encoded(batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, requests go on
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
    """What computes predictions here, as a batch says it."""
    # The last one is there only where texts are generated.
    versions = ((name, _version(name)) for name in ("isthmus", "onnxruntime", "numpy", "tokenizers"))
    return " ".join([*(f"{name} {found}" for name, found in versions if found), _processor()])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """The model of the processor: with others, the last bits of a model's answers may be others."""
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123 - a file of the kernel
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else f"{platform.machine()} {os.uname().sysname}"
