"""Maintain a project's tables and caches (`isthmus maintain`), and measure the size of tables."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow.fs as fs

from isthmus.features import clock
from isthmus.features.days import DAY
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.files import write_atomically
from isthmus.features.offline import log, pushes
from isthmus.features.offline.delta import StoredTable, TableErrors, storage_files
from isthmus.features.progress import Progress, silent
from isthmus.features.projectstatus import TableSpace
from isthmus.features.streams import events
from isthmus.orchestration.maintenance import upkeep
from isthmus.orchestration.maintenance.needed import Versions, needed_versions
from isthmus.orchestration.maintenance.upkeep import TableUpkeep
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording import table as recorded
from isthmus.serving.recorder.options import Recording

FILE = "disk.json"
"""File in the state folder with earlier sizes of each table and their times, to measure growth."""
_SAMPLES = 32
"""Sizes to keep per table."""
_NEWEST_ONLY = 1.0
"""Days to keep older versions of tables that new readers open at the newest version: a reader may still run."""
_FOLDERS = ("", f"{pushes.FOLDER}/", f"{events.FOLDER}/", f"{events.FOLDER}/{events.UNREADABLE}/")


class Maintenance(msgspec.Struct, frozen=True):
    """The result of a run.

    Attributes:
        tables: result by table.
        caches: bytes freed by cache.
        problems: messages about tables that were not maintained, or whose needed versions are unknown.
    """

    tables: dict[str, TableUpkeep]
    caches: dict[str, int]
    problems: list[str]


def maintain(project: Project, *, progress: Progress = silent) -> Maintenance:
    """Merge small files, remove versions and caches that are no longer needed, and shorten the logs of tables.

    No row of a table changes. Versions stay readable for `keep_days` in `[stores]`, and longer if a training set or the
    replay of served values needs them. Readers, builds and servers may run meanwhile: if a build or a collection of
    pushed rows has locked a table, this waits for it after all other tables. The next run finishes an interrupted one.
    If a table fails, the result has its error in `problems`, and the other tables are maintained.
    """
    done = Maintenance({}, {}, [])
    with project.locked("maintain"):
        needed: Versions | None = None  # unknown: keep all versions
        try:
            needed = needed_versions(project)
        except IsthmusError as error:
            done.problems.append(str(error))
        turns = [(name, False) for name in tables(project)]
        total = max(len(turns), 1)
        while turns:
            name, late = turns.pop(0)
            share = len(done.tables) / total
            progress(f"maintaining {name}{', after the process that writes to it' if late else ''}", share)
            lock = "recorded" if name == recorded.FOLDER else None
            try:
                with project.locked(lock, wait=late) if lock else project.adding_to(Path(name).name, wait=late):
                    if (result := _maintain(project, name, needed)) is not None:
                        done.tables[name] = result
            except BlockingIOError:
                turns.append((name, True))
            except IsthmusError as error:
                done.problems.append(str(error))
        done.caches["sources"] = _trim(project, "sources/*.parquet", 1.0)
        done.caches["teacher"] = _trim(project, "teacher/*/*/key.json", project.settings.stores.keep_days)
        samples, now = _samples(project), clock.now()
        for name, table in done.tables.items():
            own = samples.setdefault(name, [])
            if not own or now - own[-1][0] >= DAY // 2:
                samples[name] = [*own, (now, table.space.bytes)][-_SAMPLES:]
        write_atomically(project.state / FILE, msgspec.json.encode(samples))
    progress("all tables are maintained", 1.0)
    return done


def require_done(result: Maintenance) -> None:
    if result.problems:
        raise DataError("maintenance", "; ".join(result.problems), remedy="fix this, then run `isthmus maintain` again")


def tables(project: Project) -> list[str]:
    """List the folders of the Delta tables in the offline store, including tables of removed views."""
    storage = storage_files(project.offline, project.storage_options)

    def folders(place: str) -> set[str]:
        found = storage.get_file_info(fs.FileSelector(place, allow_not_found=True))
        return {info.base_name for info in found if info.type == fs.FileType.Directory}

    with _stored(project, "").reading():
        named = [f"{place}{name}" for place in _FOLDERS for name in sorted(folders(place))]
        return [name for name in named if "_delta_log" in folders(name)]


def spaces(project: Project) -> dict[str, TableSpace]:
    """Measure each table, its growth since an earlier `isthmus maintain`, and the days until that fills the disk.

    Leave out tables that cannot be read.
    """
    samples, now, folder = _samples(project), clock.now(), Path(project.offline)
    free = shutil.disk_usage(folder).free if folder.is_dir() else None
    measured = dict[str, TableSpace]()
    for name in tables(project):
        with suppress(IsthmusError):
            measured[name] = upkeep.space(_stored(project, name))
    for name, table in measured.items():
        for at, size in samples.get(name, [])[:1]:
            if now - at >= DAY:
                growth = (table.bytes - size) * DAY / (now - at)
                left = None if free is None or growth <= 0 else free / growth
                measured[name] = msgspec.structs.replace(table, growth=growth, days_left=left)
    return measured


def _maintain(project: Project, name: str, needed: Versions | None) -> TableUpkeep | None:
    stored, keep_days = _stored(project, name), project.settings.stores.keep_days
    if name.startswith(f"{events.FOLDER}/"):
        # `isthmus stream` merges the files itself, and a second writer would conflict with it.
        return upkeep.maintain(stored, _NEWEST_ONLY, merge=False)
    if name == recorded.FOLDER:
        keep = (project.settings.server.record or Recording()).keep_days
        if keep is not None:
            recorded.RecordedAnswers.of(project).delete_older(keep, clock.now())
        return upkeep.maintain(stored, _NEWEST_ONLY, merge=False)
    if name == log.FOLDER:
        return upkeep.maintain(stored, _NEWEST_ONLY)
    return upkeep.maintain(stored, float("inf") if needed is None else keep_days, (needed or {}).get(name, ()))


def _stored(project: Project, name: str) -> StoredTable:
    remedy = "nothing is lost: fix the cause, then run `isthmus maintain` again"
    errors = TableErrors(
        f"table {name}" if name else "offline tables",
        damaged="restore its folder; `isthmus build` computes the table of a view again",
        conflict=("another process wrote to it at the same moment", remedy), unwritten=remedy,
    )  # fmt: skip
    return StoredTable(project.offline, name, project.storage_options, errors, versions=True)


def _trim(project: Project, pattern: str, days: float) -> int:
    """Delete cached files that were not used for `days`, and the folder of each such `key.json`. Return bytes freed."""
    freed = 0
    for file in [*project.state.glob(pattern)]:
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > days * DAY / 1e6:
                whole = file.name == "key.json"
                freed += sum(part.stat().st_size for part in (file.parent.rglob("*") if whole else [file]))
                shutil.rmtree(file.parent) if whole else file.unlink()
    return freed


def _samples(project: Project) -> dict[str, list[tuple[int, int]]]:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((project.state / FILE).read_bytes(), type=dict[str, list[tuple[int, int]]])
    return {}
