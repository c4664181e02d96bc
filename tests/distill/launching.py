"""Distillations by several processes; as a script, one of them: `FOLDER CHANGES`, the changes of `run` in JSON."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from isthmus.distill.losses.hidden import HiddenStates
from isthmus.distill.losses.objective import Objective, Schedule, Term
from isthmus.distill.onnx.exporter import export_network
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.features.errors import IsthmusError
from tests.distill.sampletasks import Line, Lines
from tests.distill.support import PROFILE, run, training_set
from tests.processes import end, running_for

ANSWER = "answer-{}.json"
WAIT_SECONDS = 8.0
"""Time after which these processes give up on another one."""


class Normed(nn.Module):
    """A student with batch norm, whose hidden state a loss adapts."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, units), nn.BatchNorm1d(units), nn.Linear(units, 1)

    def forward(self, numbers: Tensor) -> dict[str, Any]:
        hidden = self.first(numbers)
        return {"value": self.last(self.norm(hidden).tanh())[:, 0], "hidden": [hidden[:, None]]}


class Plain(Line):
    """Its hidden state is an output, and nothing is dropped."""

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self.layers[2] = nn.Identity()

    def forward(self, numbers: Tensor) -> dict[str, Any]:
        return {**super().forward(numbers), "hidden": [self.layers[0](numbers)[:, None]]}


class Asking(nn.Module):
    """A teacher that writes down how many rows this process asked."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(64)

    def forward(self, numbers: Tensor) -> dict[str, Any]:
        if "ASKED" in os.environ:
            with (Path(os.environ["ASKED"]) / os.environ.get("RANK", "0")).open("a") as asked:
                asked.write(f"{len(numbers)}\n")
        return {**self.line(numbers), "hidden": numbers[:, None, None]}


class Adapted(Lines):
    """The weight of a loss with weights of its own becomes 0 halfway."""

    def teacher(self) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return NetworkTeacher(Asking(), ["value", "hidden"], name="asking")

    def student(self) -> nn.Module:
        return Plain(self.units)

    def objective(self) -> Objective:
        states = HiddenStates({0: 0}, student_widths=[self.units], teacher_widths=[2])
        return Objective({
            "labels": Term(mse_loss, input="student.value", target="labels"),
            "states": Term(states, Schedule(1.0, 0.0, until=0.5), student="student.hidden", teacher="teacher.hidden"),
        })  # fmt: skip


class AdaptedNormed(Adapted):
    """Its student has batch norm, whose statistics each process has of its own rows."""

    def student(self) -> nn.Module:
        return Normed(self.units)

    def model(self, student: nn.Module) -> onnx.ModelProto:
        example = {"numbers": np.zeros((2, 2), np.float32)}
        return export_network(Value(student), example, {"numbers": ("N", 2)}, ["value"], {})


class Value(nn.Module):
    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def forward(self, numbers: Tensor) -> Any:
        return self.student(numbers)["value"]


@contextmanager
def launched(folder: Path, processes: int = 2, **changes: Any) -> Iterator[Iterator[str]]:
    """The lines of processes that distill into a folder, started by torchrun."""
    launcher = ["--nproc-per-node", str(processes), "--rdzv-backend", "c10d"]
    address = ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = ["-m", "torch.distributed.run", *launcher, *address, "-m", __name__, str(folder), json.dumps(changes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    for file in folder.glob(ANSWER.format("*")):
        file.unlink()
    with subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield iter(process.stdout)
            process.wait(120)
        finally:
            end(folder)


def ranks(folder: Path) -> dict[int, psutil.Process]:
    return {int(process.environ()["RANK"]): process for process in running_for(folder) if "RANK" in process.environ()}


def answers(folder: Path, lines: Iterator[str]) -> dict[int, Any]:
    """What each process that was not killed answered at its end, by rank."""
    for _ in lines:
        pass
    return {rank: json.loads(file.read_text()) for rank in range(4) if (file := folder / ANSWER.format(rank)).exists()}


def main() -> None:
    folder, changes, rank = Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["RANK"])
    table = training_set(changes.pop("rows", 400) + rank * changes.pop("more", 0))
    own = changes.pop("folders", [""] * (rank + 1))[rank]
    stops: str | None = changes.pop("stops", None)
    profile = replace(PROFILE, wait_seconds=WAIT_SECONDS, shard=changes.pop("shard", False))

    def told(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        if stops is not None and text.startswith(stops):  # only the first process is told anything
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        report = run(folder / own, table, profile, told=told, **changes)
        code, answer = 0, {**report.as_dict(), "leads": report.leads}
    except IsthmusError as error:
        code, answer = error.exit_code, error.as_dict()
    (folder / ANSWER.format(rank)).write_text(json.dumps(answer))
    sys.exit(code)


if __name__ == "__main__":
    main()
