"""`recorded`: brings what servers recorded of their answers from their spool into the table.

In this order, a lot at a time: the table gets the answers together with the number of each process' last batch, then
the segments go that have their end. A run that was killed at any moment is finished by the next one.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features import clock
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import DataError, IsthmusError, RequestError, first_line
from isthmus.features.files import private_folder, write_atomically
from isthmus.features.progress import Progress, silent
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.table import RecordedAnswers, answers_of
from isthmus.orchestration.server.collect import repeat
from isthmus.package.manifest import open_package, read_contract
from isthmus.serving.deployment.cache import folder_of
from isthmus.serving.recorder.batch import AnswerBatch, DamagedBatchError, OtherVersionError, batches, count, size
from isthmus.serving.recorder.options import Recording
from isthmus.serving.recorder.spool import SUFFIX, ended, note_collected, segments

LOT = 1 << 16
"""Answers of a commit, about."""
_AGAIN = ".again"
"""Part of the name of a segment that was set aside and put back."""
BYTES = 64 << 20
"""Of the answers of a commit: one may have ten thousand rows."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The counts of a run.

    Attributes:
        answers: that the table has more than before.
        missing: batches that were dropped, or lost, between those that are in the table.
        problems: what could not be collected, in sentences.
    """

    answers: int = 0
    missing: int = 0
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Lot:
    """Batches of a commit, and the segments that go, or are put aside, once they are in the table."""

    batches: list[AnswerBatch] = field(default_factory=list)
    parts: list[pa.Table] = field(default_factory=list)
    over: list[Path] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)
    answers: int = 0
    size: int = 0


@dataclass(slots=True)
class _Problems:
    """What could not be read: sentences, and the segments they are about."""

    sentences: list[str] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)
    other: set[Path] = field(default_factory=set)

    def note(self, path: Path, problem: str, *, over: bool) -> None:
        """Note that a part of a segment cannot be read, unless a server is still writing it."""
        if over:
            self.damaged.add(path)
            back = f"{path.stem}{_AGAIN}{SUFFIX}"
            self.sentences.append(
                f"{path.name} {problem}: what was whole is in the table, and the file is in recorded/damaged; once it "
                f"is mended, put it back into recorded/spool as {back}"
            )


def collect(project: Project, *, progress: Progress = silent, lot: int = LOT) -> Collected:
    """Brings all answers that are in the spool by now into the table, each once.

    Raises:
        DataError: the table cannot be read or written. What was recorded stays in the spool.
    """
    table = RecordedAnswers.of(project)
    answers, missing, problems = 0, 0, _Problems()
    with project.locked("recorded"):
        began = time.time()
        found = segments(project.spool)
        last = table.last(list(dict.fromkeys(map(_run, found))))
        waiting = _Lot()
        for number, path in enumerate(found):
            progress("collecting recorded answers", number / len(found))
            # Before it is read: what comes behind that is for the next run.
            over, again = ended(path), table.batches(_run(path)) if _AGAIN in path.name else None
            for batch in _whole(path, problems, over=over):
                before = last[batch.run]
                done = batch.number in again if again is not None else batch.number <= before
                if done and not over:
                    continue
                try:
                    # A run that skipped a batch since it was wrong may have gone on to later ones.
                    part = answers_of(batch)
                except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
                    problems.note(path, f"has a batch that cannot be collected ({first_line(error)})", over=over)
                    continue
                if done:
                    continue
                waiting.parts.append(part)
                missing += max(batch.number - before - 1, 0)
                last[batch.run] = max(before, batch.number)
                waiting.batches.append(batch)
                waiting.answers += count(batch)
                waiting.size += size(batch)
                if waiting.answers >= lot or waiting.size >= BYTES:
                    answers += _commit(project, table, waiting, last)
                    waiting = _Lot()
            if path in problems.damaged:
                waiting.damaged.append(path)
            elif over and path not in problems.other:
                waiting.over.append(path)
        answers += _commit(project, table, waiting, last)
        keep = (project.settings.server.record or Recording()).keep_days
        if keep is not None:
            table.keep(keep, clock.now())
        note_collected(project.spool, began)
    progress("all recorded answers are in the table", 1.0)
    return Collected(answers, missing, tuple(problems.sentences))


def follow(project: Project, say: Callable[[str], None], stopped: Event | None = None) -> None:
    """Collects every `history_seconds` until it is stopped."""
    repeat(lambda: "\n".join(collect(project).problems), project.settings.stores.history_seconds, say, stopped)


def _commit(project: Project, table: RecordedAnswers, lot: _Lot, last: Mapping[str, int]) -> int:
    added = 0
    if lot.batches:
        keep_contracts(project, {group.contract for batch in lot.batches for group in batch.groups})
        added = table.append(lot.batches, lot.parts, last)
    for path in lot.over:
        path.unlink(missing_ok=True)
    for path in lot.damaged:
        aside = damaged_folder(project)
        private_folder(aside)
        with suppress(FileNotFoundError):  # removed to make room
            path.rename(aside / path.name)
    return added


def absence(project: Project, identity: str) -> RequestError:
    """Why an answer is not in the table."""
    run, _, number = identity.rpartition("-")
    where = f"answer {identity}"
    try:
        place = int(number, 16)
    except ValueError:
        return RequestError(
            where, "is no id of an answer", expected="that of `isthmus-answer`, such as 3f9a1c22b7d0-1a2b"
        )
    known = RecordedAnswers.of(project).read(ds.field("run") == run, ["run", "sequence"])["sequence"].to_numpy()
    # What came before all that is left of its server may also be older than `keep_days`.
    if run and len(known) and known.min() < place < known.max():
        # A text has its id when it begins, and is recorded when it ends.
        found = "was dropped, or is a text that had not ended: later answers of its server are in the table"
        return RequestError(where, found, remedy="see `isthmus_dropped_answers_total`, and `memory_mb` and `spool_mb`")
    if run and any(path.name.startswith(f"{run}-") for path in segments(project.spool)):
        return RequestError(where, "is not in the table yet", remedy="run `isthmus recorded`")
    return RequestError(
        where, "there is none in the table",
        remedy="it was not recorded, was dropped, was in the memory of a server that was killed, or is older than "
        "`keep_days`",
    )  # fmt: skip


def damaged_folder(project: Project) -> Path:
    """The segments of which only a part could be read."""
    return project.recorded / "damaged"


def _run(path: Path) -> str:
    return path.name.partition("-")[0]


def _whole(path: Path, problems: _Problems, *, over: bool) -> Iterator[AnswerBatch]:
    """The whole batches of a segment; `over` is whether it has its end."""
    try:
        for batch in batches(path.read_bytes()):
            if batch.run == _run(path):
                yield batch
            else:
                problems.note(path, f"has a batch of {batch.run!r:.20}", over=over)
    except FileNotFoundError:  # removed to make room
        return
    except OtherVersionError as error:
        problems.other.add(path)
        problems.sentences.append(f"{path.name} {error}: collect it with the version of Isthmus that wrote it")
    except (DamagedBatchError, OSError) as error:
        problems.note(path, str(error), over=over)


def contracts_folder(project: Project) -> Path:
    """The contracts of recorded answers, by hash: they outlast those of the project."""
    return project.recorded / "contracts"


def keep_contracts(project: Project, hashes: set[str]) -> None:
    """Keeps the contracts of answers, where the project or a deployed package still has them."""
    folder = contracts_folder(project)
    missing = {known for known in hashes if not (folder / f"{known}.json").exists()}
    if not missing:
        return
    for contract in _known(project):
        if contract.hash in missing:
            write_atomically(folder / f"{contract.hash}.json", contract.dumps())
            missing.discard(contract.hash)


def _known(project: Project) -> Iterator[Contract]:
    generations = project.generations()
    yield from (*generations.every(), *generations.forgotten)
    for package in sorted(folder_of(project.deployment_file).glob("*")):
        with suppress(IsthmusError):
            yield read_contract(open_package(package))


def contract_of(project: Project, known: str) -> Contract | None:
    """The contract of recorded answers; None if nobody has it any more."""
    file = contracts_folder(project) / f"{known}.json"
    try:
        return Contract.loads(file.read_bytes(), str(file))
    except FileNotFoundError:
        return next((contract for contract in _known(project) if contract.hash == known), None)
    except IsthmusError as error:
        raise DataError(str(file), "is no contract", remedy="remove it") from error
