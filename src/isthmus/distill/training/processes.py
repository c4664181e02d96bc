"""The processes of one distillation, which train each model together, or models side by side; rank 0 leads."""

import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from isthmus.distill.accelerator import SIDE_BY_SIDE, resolve
from isthmus.features.errors import DataError, DependencyError, LostProcessError, first_line
from isthmus.features.profiles import TrainingProfile

BEAT_SECONDS = 0.5
"""Time between signs of life of a process."""
_LONGEST_NAP = 0.5
_FAILED = "failed"
_Result = TypeVar("_Result")
_REMEDY = "see the message of that process; the same command goes on from the last checkpoint"
_joined: "list[Processes]" = []
_joins = 0


@dataclass(eq=False)
class Processes:
    """The processes of a launcher such as torchrun, connected by its store and by a process group of torch.

    All processes call the same methods in the same order. Attributes:

    * rank: number of this process, from 0.
    * count: number of processes.
    * where: what they do, for errors.
    * wait_seconds: time after which a process gives up on another one that does not answer.
    """

    rank: int = 0
    count: int = 1
    where: str = ""
    wait_seconds: float = 0.0
    _store: Any = None
    _turn: int = 0
    _seen: dict[int, tuple[bytes, float]] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def together(self) -> int:
        """Number of processes that train one model together."""
        return 1 if SIDE_BY_SIDE in os.environ else self.count

    def first(self, work: Callable[[], _Result], kind: Any = None) -> _Result:
        """Do `work` in the first process alone, and return its result, of a JSON-able `kind`, in every process."""
        if self.count == 1:
            return work()
        self._turn += 1
        key = f"turn-{self._turn}"
        result = None
        if self.leads:
            result = work()
            content = torch.frombuffer(bytearray(msgspec.json.encode(result)), dtype=torch.uint8)
            self._store.set(key, str(len(content)))
        else:
            content = torch.empty(int(self._value(0, key)), dtype=torch.uint8)
        distributed.broadcast(content, 0)
        return result if self.leads else msgspec.json.decode(content.numpy().tobytes(), type=kind)  # type: ignore[return-value]

    def in_turn(self, work: Callable[[], _Result]) -> _Result:
        """Do `work` in rank 0, then in the other processes, which can reuse what rank 0 stored."""
        if self.leads:
            result = work()
            self.first(lambda: None)
            return result
        self.first(lambda: None)
        return work()

    def meet(self, value: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """Wait for all processes, and return the value of each."""
        if self.count == 1:
            return [dict(value or {})]
        self._turn += 1
        self._store.set(f"turn-{self._turn}/{self.rank}", msgspec.json.encode(value or {}))
        contents = [self._value(rank, f"turn-{self._turn}/{rank}") for rank in range(self.count)]
        return [msgspec.json.decode(content, type=dict[str, str]) for content in contents]

    def require_same(self, content: Mapping[str, str]) -> None:
        """Raise a DataError, in every process, unless all have the same `content`: digests by name."""
        every = self.meet({**content, "host": socket.gethostname()})
        for rank, other in enumerate(every):
            if wrong := [name for name in content if other[name] != every[0][name]]:
                pairs = ", ".join(f"{name} {other[name][:12]}, not {every[0][name][:12]}" for name in wrong)
                raise DataError(
                    f"{self.where}: rank {rank} of {self.count} on {other['host']}",
                    f"sees other inputs than rank 0 on {every[0]['host']}: {pairs}",
                    expected="the same project, definitions, training set and versions in every process",
                    remedy="let all processes see one folder with the project and its state",
                )

    def lost(self, error: RuntimeError) -> LostProcessError:
        """Return the error for a failed connection, with the ranks that failed, ended or hang."""
        with suppress(RuntimeError):
            try:
                self._alive(0)
            except LostProcessError as known:
                return known
            before = self._beats()
            time.sleep(3 * BEAT_SECONDS)
            after = self._beats()
            if gone := [rank for rank in range(self.count) if rank != self.rank and before[rank] == after[rank]]:
                ranks = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} of {self.count}"
                return LostProcessError(self.where, f"{ranks} ended or hangs", remedy=_REMEDY)
        late = f"for {self.wait_seconds:g} s" if "imed out" in str(error) else f"({first_line(error)[:200]})"
        return LostProcessError(self.where, f"another of {self.count} processes did not answer {late}", remedy=_REMEDY)

    def _beats(self) -> list[bytes]:
        return [self._store.get(f"beat/{rank}") for rank in range(self.count)]

    def _value(self, rank: int, key: str) -> Any:
        nap = 0.005
        while not self._store.check([key]):
            self._alive(rank)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return self._store.get(key)

    def _alive(self, rank: int) -> None:
        """Raise a LostProcessError if any process has failed, or if `rank` has given no sign of life for long."""
        if self._store.check([_FAILED]):
            failed = self._store.get(_FAILED).decode()
            raise LostProcessError(self.where, f"rank {failed} of {self.count} failed", remedy=_REMEDY)
        beat, now = self._store.get(f"beat/{rank}"), time.monotonic()
        before, since = self._seen.setdefault(rank, (beat, now))
        if beat != before:
            self._seen[rank] = beat, now
        elif now - since > self.wait_seconds:
            found = f"rank {rank} of {self.count} gave no sign of life for {self.wait_seconds:g} s"
            raise LostProcessError(self.where, found, remedy=_REMEDY)


@contextmanager
def joined(profile: TrainingProfile, where: str) -> Iterator[Processes]:
    """Connect to the launcher's other processes for the `with` block. Without a launcher, there are none.

    A nested call returns the same processes. Raise a DependencyError if the processes cannot connect, or if a device is
    missing. Errors of connections in the block become a LostProcessError.
    """
    if _joined or os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        yield _joined[-1] if _joined else Processes()
        return
    processes, ended = _join(profile, where)
    _joined.append(processes)
    try:
        yield processes
    except BaseException as error:
        lost = processes.lost(error) if isinstance(error, RuntimeError) and _is_connection(error) else None
        with suppress(RuntimeError):
            if not isinstance(lost or error, LostProcessError):
                processes._store.set(_FAILED, f"{processes.rank} on {socket.gethostname()}")
        if lost is not None:
            raise lost from error
        raise
    finally:
        _joined.pop()
        ended.set()
        with suppress(RuntimeError):
            distributed.destroy_process_group()


def _join(profile: TrainingProfile, where: str) -> tuple[Processes, threading.Event]:
    global _joins
    _joins += 1
    device, here = resolve(profile), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and SIDE_BY_SIDE not in os.environ:
        if here > torch.cuda.device_count():
            raise DependencyError(
                where, f"was started as {here} processes on a machine with {torch.cuda.device_count()} CUDA devices",
                expected="a device for each process", remedy='start fewer processes, or set device = "cpu"',
            )  # fmt: skip
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=profile.wait_seconds)
    try:
        store, rank, count = next(iter(rendezvous("env://", timeout=timeout)))
        # A name of its own for each call: the launcher's store keeps the keys of an earlier one.
        store, signs = (PrefixStore(f"isthmus-{_joins}", of) for of in (store, store.clone()))
        store.set(f"beat/{rank}", "0")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise DependencyError(
            where, f"the {os.environ['WORLD_SIZE']} processes cannot connect: {first_line(error)}",
            expected="the environment of torchrun or accelerate launch, and an address that all processes reach",
            remedy="on one machine, start them with `isthmus distill --processes 2`; for one process, unset WORLD_SIZE",
        ) from error  # fmt: skip
    ended = threading.Event()

    def live() -> None:
        number = 0
        with suppress(RuntimeError):  # the launcher has ended
            while not ended.wait(BEAT_SECONDS):
                number += 1
                signs.set(f"beat/{rank}", str(number))

    threading.Thread(target=live, daemon=True).start()
    return Processes(rank, count, where, profile.wait_seconds, store), ended


def _is_connection(error: RuntimeError) -> bool:
    return isinstance(error, distributed.DistError) or any(name in str(error) for name in ("gloo", "NCCL", "Store"))


def table_digest(table: pa.Table) -> str:
    """Return a digest of the values of a table, whatever its memory looks like."""
    digest = sha256()

    class Sink(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            digest.update(data)
            return len(data)

    pq.write_table(table, pa.PythonFile(Sink(), "w"), compression="none")
    return digest.hexdigest()
