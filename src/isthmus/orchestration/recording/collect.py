"""Collect recorded answers from the servers' spool into the table (`isthmus answers collect`)."""

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
from isthmus.orchestration.server.collect import run_every
from isthmus.package.manifest import open_package, read_contract
from isthmus.serving.deployment.cache import folder_of
from isthmus.serving.recorder.batch import (
    AnswerBatch,
    DamagedBatchError,
    OtherVersionError,
    batches,
    count,
    table_bytes,
)
from isthmus.serving.recorder.options import Recording
from isthmus.serving.recorder.spool import SUFFIX, is_complete, note_collected, segments

# Answers per commit, approximately.
LOT = 1 << 16
# Marks a segment that an operator repaired and put back.
_AGAIN = ".again"
# Bytes per commit, approximately: one answer may have ten thousand rows.
BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CollectedAnswers:
    """Result of one collection. `missing` batches were dropped or lost, counted from gaps in the batch numbers."""

    answers: int = 0
    missing: int = 0
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Lot:
    batches: list[AnswerBatch] = field(default_factory=list)
    parts: list[pa.Table] = field(default_factory=list)
    finished: list[Path] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)
    answers: int = 0
    size: int = 0


@dataclass(slots=True)
class _Problems:
    sentences: list[str] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)
    other: set[Path] = field(default_factory=set)

    def note(self, path: Path, problem: str, *, finished: bool) -> None:
        """Note that part of a spool file cannot be read, if the file is `finished`: no server writes to it any more."""
        if finished:
            self.damaged.add(path)
            back = f"{path.stem}{_AGAIN}{SUFFIX}"
            self.sentences.append(
                f"{path.name} {problem}. Its complete batches are in the table and the file is in recorded/damaged. "
                f"Repair it, then put it back into recorded/spool as {back}"
            )


def collect(project: Project, *, progress: Progress = silent, lot: int = LOT) -> CollectedAnswers:
    """Move recorded answers from the servers' spool files to the table of recorded answers, each exactly once.

    Also saves the contracts of the answers for replays, and deletes answers older than the setting `keep_days` from the
    table. Deletes spool files that are collected and that no server writes to any more. Moves such files to
    `damaged_folder` if they are damaged. Files of another version of Isthmus stay in the spool. `problems` of the
    result lists damaged files and files of another version; they raise no error. Commits about `lot` answers at a time.
    Waits while another process collects. After a DataError, the spool still has the answers that are not in the table.
    """
    table = RecordedAnswers.of(project)
    answers, missing, problems = 0, 0, _Problems()
    with project.locked("recorded"):
        began = time.time()
        paths = segments(project.spool)
        last = table.last_batches(list(dict.fromkeys(map(_run, paths))))
        waiting = _Lot()
        for number, path in enumerate(paths):
            progress("collecting recorded answers", number / len(paths))
            # Checked before reading: batches written later are left to the next run.
            finished, again = is_complete(path), table.batches(_run(path)) if _AGAIN in path.name else None
            for batch in _whole(path, problems, finished=finished):
                before = last[batch.run]
                done = batch.number in again if again is not None else batch.number <= before
                if done and not finished:
                    continue
                try:
                    # A run that skipped a batch since it was wrong may have gone on to later ones.
                    part = answers_of(batch)
                except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
                    problems.note(
                        path, f"has a batch that cannot be collected ({first_line(error)})", finished=finished
                    )
                    continue
                if done:
                    continue
                waiting.parts.append(part)
                missing += max(batch.number - before - 1, 0)
                last[batch.run] = max(before, batch.number)
                waiting.batches.append(batch)
                waiting.answers += count(batch)
                waiting.size += table_bytes(batch)
                if waiting.answers >= lot or waiting.size >= BYTES:
                    answers += _commit(project, table, waiting, last)
                    waiting = _Lot()
            if path in problems.damaged:
                waiting.damaged.append(path)
            elif finished and path not in problems.other:
                waiting.finished.append(path)
        answers += _commit(project, table, waiting, last)
        keep_days = (project.settings.server.record or Recording()).keep_days
        if keep_days is not None:
            table.delete_older(keep_days, clock.now())
        note_collected(project.spool, began)
    progress("all recorded answers are in the table", 1.0)
    return CollectedAnswers(answers, missing, tuple(problems.sentences))


def follow(project: Project, say: Callable[[str], None], stopped: Event | None = None) -> None:
    run_every(lambda: "\n".join(collect(project).problems), project.settings.stores.history_seconds, say, stopped)


def _commit(project: Project, table: RecordedAnswers, lot: _Lot, last: Mapping[str, int]) -> int:
    # Append first, together with the number of each process's last batch, then delete: the next run finishes the work
    # of a killed run.
    added = 0
    if lot.batches:
        keep_contracts(project, {group.contract for batch in lot.batches for group in batch.groups})
        added = table.append(lot.batches, lot.parts, last)
    for path in lot.finished:
        path.unlink(missing_ok=True)
    for path in lot.damaged:
        aside = damaged_folder(project)
        private_folder(aside)
        with suppress(FileNotFoundError):  # removed to make room
            path.rename(aside / path.name)
    return added


def missing_answer_error(project: Project, identity: str) -> RequestError:
    run, _, number = identity.rpartition("-")
    where = f"answer {identity}"
    try:
        place = int(number, 16)
    except ValueError:
        return RequestError(
            where, "is not an answer id", expected="the `isthmus-answer` header, such as 3f9a1c22b7d0-1a2b"
        )
    known = RecordedAnswers.of(project).read(ds.field("run") == run, ["run", "sequence"])["sequence"].to_numpy()
    # Answers before the first remaining one of the server may also be older than `keep_days`.
    if run and len(known) and known.min() < place < known.max():
        # A text gets its id when generation starts, and is recorded when it ends.
        problem = "was dropped, or its text had not ended: the table has later answers from its server"
        remedy = "check the metric `isthmus_dropped_answers_total`, and raise `memory_mb` or `spool_mb`"
        return RequestError(where, problem, remedy=remedy)
    if run and any(path.name.startswith(f"{run}-") for path in segments(project.spool)):
        return RequestError(where, "is not in the table yet", remedy="run `isthmus answers collect`")
    return RequestError(
        where, "is not in the table",
        remedy="check that it was recorded; it may have been dropped, lost with a killed server, or be older than "
        "`keep_days`",
    )  # fmt: skip


def damaged_folder(project: Project) -> Path:
    return project.recorded / "damaged"


def _run(path: Path) -> str:
    return path.name.partition("-")[0]


def _whole(path: Path, problems: _Problems, *, finished: bool) -> Iterator[AnswerBatch]:
    try:
        for batch in batches(path.read_bytes()):
            if batch.run == _run(path):
                yield batch
            else:
                problems.note(path, f"has a batch of another process, {batch.run!r:.20}", finished=finished)
    except FileNotFoundError:  # removed to make room
        return
    except OtherVersionError as error:
        problems.other.add(path)
        problems.sentences.append(f"{path.name} {error}: collect it with the version of Isthmus that wrote it")
    except (DamagedBatchError, OSError) as error:
        problems.note(path, str(error), finished=finished)


def contracts_folder(project: Project) -> Path:
    return project.recorded / "contracts"


def keep_contracts(project: Project, hashes: set[str]) -> None:
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
    yield from (*generations.contracts(), *generations.forgotten)
    for package in sorted(folder_of(project.deployment_file).glob("*")):
        with suppress(IsthmusError):
            yield read_contract(open_package(package))


def find_contract(project: Project, contract_hash: str) -> Contract | None:
    file = contracts_folder(project) / f"{contract_hash}.json"
    try:
        return Contract.loads(file.read_bytes(), str(file))
    except FileNotFoundError:
        return next((contract for contract in _known(project) if contract.hash == contract_hash), None)
    except IsthmusError as error:
        raise DataError(str(file), "is not a contract", remedy="remove the file") from error
