"""Compare serving alone with serving next to a training, which yields to serving or does not.

A server answers predictions at a steady rate, well below its capacity. Each request is sent when it is due, even if
earlier ones are late, and its latency counts from then. Each round measures four sides, starting with another one each
time: serving alone, alone again, with a training that yields, and with one that does not. The server's objective is
1.25 times the p99 that it reports when alone. The results are the medians of the rounds' p99, and of their ratios to
serving alone. The ratio of serving alone twice shows the noise of the machine.

The training uses as many threads as there are cores. It starts before a round is measured, and its steps are counted
during the round, and also without serving. Tests check that yielding does not change its weights.

Run it on an idle machine.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from processes import started
from result import Comparison, at_most, less, more, options_parser, plain_figure, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serving.support import CONTRACT, Server, fill, make_package, serving, wait

from isthmus.features.errors import Stopped
from isthmus.features.latency import WINDOW_SECONDS, LatencyReader
from isthmus.features.redis.embedded import EmbeddedRedis

ASKED = json.dumps({"entities": {"carrier": ["UA"]}, "request": {"distance": [1]}})
CONNECTIONS = 4
BAR = 1.5
"""Largest ratio of p99 with a training that yields to p99 alone."""
ROOM = 1.25
"""Ratio of the objective to the p99 that the server reports when alone."""
SIDES = ("alone", "alone again", "yielding", "not yielding")
IDLE, TRAINED = SIDES[:2], SIDES[2:]


def load(server: Server, rate: float, seconds: float) -> np.ndarray[Any, Any]:
    """Return the latencies of predictions in ms, counted from their due times; `rate` per second, evenly spaced."""
    latencies: list[list[float]] = [[] for _ in range(CONNECTIONS)]
    begin = time.perf_counter() + 0.1
    host, port = server.http.base_url.host, server.http.base_url.port

    def ask(number: int) -> None:
        http = HTTPConnection(host, port, timeout=30)
        for turn in range(number, int(rate * seconds), CONNECTIONS):
            due = begin + turn / rate
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            http.request("POST", "/predict", ASKED, {"content-type": "application/json"})
            answer = http.getresponse()
            answer.read()
            latencies[number].append((time.perf_counter() - due) * 1000)
            if answer.status != 200:
                raise RuntimeError(f"a prediction returned status {answer.status}")
        http.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONNECTIONS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    done = np.concatenate([np.array(times) for times in latencies])
    if len(done) < int(rate * seconds):
        raise RuntimeError(f"{len(done):,} of {int(rate * seconds):,} requests were answered")
    return done


@contextmanager
def training(folder: Path, heard: str, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a training in its own process; yields it when it makes steps."""
    steps = folder / "steps"
    steps.unlink(missing_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    command = [sys.executable, __file__, "--train", heard, str(steps)]
    with started(command, log, {"GOMP_SPINCOUNT": "2000"}) as process:  # as set by `isthmus distill`
        deadline = time.monotonic() + 180
        while not counted(folder):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the training did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield process


def counted(folder: Path) -> int:
    try:
        return int((folder / "steps").read_text())
    except FileNotFoundError:
        return 0


def train(heard: str, steps: Path) -> None:
    """Train until stopped, and write the number of steps to a file every tenth of a second."""
    import torch
    from torch import nn

    from isthmus.distill.accelerator import accelerator
    from isthmus.distill.settings import Settings
    from isthmus.distill.training.loop import Training
    from isthmus.features.profiles import TrainingProfile

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    layers = [nn.Linear(110, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)]
    rows, written, done = torch.randn(65_536, 110), 0.0, 0

    def step(module: nn.Module, batch: torch.Tensor, _share: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nonlocal written, done
        done += 1
        if time.monotonic() - written > 0.1:
            written = time.monotonic()
            partial = steps.with_suffix(".partial")
            partial.write_text(str(done))
            partial.replace(steps)
        return (module(batch) - batch[:, :1]).square().mean(), {}

    training = Training(
        nn.Sequential(*layers), rows, step, Settings(steps=10**9, batch=1024, evaluate_every=10**9),
        accelerator(TrainingProfile()), folder=steps.parent / "run",
        progress=lambda text, _share: print(f"{time.monotonic():.1f} {text}", flush=True),
        latency=None if heard == "-" else LatencyReader(Path(heard)),
    )  # fmt: skip
    with suppress(Stopped):
        training.run()


def measured(folder: Path, redis: str, rate: float, seconds: float, rounds: int) -> list[Comparison]:
    root = folder / "server"
    root.mkdir()
    (root / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(root / "package")
    latency_file = root / "latency"
    with serving(root, redis, latency=str(latency_file)) as server:
        objective = ROOM * reported_p99(server, package, rate, max(seconds, 3 * WINDOW_SECONDS), latency_file)
    sys.stderr.write(f"objective: {objective:.2f} ms\n")
    p99: dict[str, list[float]] = {side: [] for side in SIDES}
    speed: dict[str, list[float]] = {side: [] for side in ("training alone", *TRAINED)}
    order = list(SIDES)
    with serving(root, redis, latency=str(latency_file), latency_objective_ms=objective) as server:
        ready(server, package)
        for number in range(rounds):
            with training(folder, "-", folder / "alone.log"):
                speed["training alone"].append(steps_of(folder, seconds / 2))
            for side in order:
                latency = str(latency_file) if side == "yielding" else "-"
                with nullcontext() if side in IDLE else training(folder, latency, folder / f"{side} {number}.log"):
                    load(server, rate, 3 * WINDOW_SECONDS)  # until the training has adapted its threads
                    before, began = counted(folder), time.perf_counter()
                    p99[side].append(float(np.percentile(load(server, rate, seconds), 99)))
                    if side in TRAINED:
                        speed[side].append((counted(folder) - before) / (time.perf_counter() - began))
            order.append(order.pop(0))
            sys.stderr.write(f"round {number + 1}: p99 {last(p99)} ms; steps a second {last(speed)}\n")
    for log in sorted(folder.glob("yielding *.log")):
        sys.stderr.write(f"{log.stem}:\n{log.read_text()}")
    return compared(p99, speed, f"{rate:g} predictions a second", objective)


def compared(
    p99: dict[str, list[float]], speed: dict[str, list[float]], case: str, objective: float
) -> list[Comparison]:
    alone = p99["alone"]
    middle = {side: statistics.median(times) for side, times in p99.items()}
    rates = {side: statistics.median(found) for side, found in speed.items()}
    pairs = {side: [one / other for one, other in zip(p99[side], alone, strict=True)] for side in SIDES[1:]}
    ratio = {side: statistics.median(ratios) for side, ratios in pairs.items()}
    noise = pairs["alone again"]
    return [
        plain_figure(f"{case}: p99 alone, objective {objective:.3g} ms", "ms", middle["alone"]),
        *(less(f"p99, training beside it {side}", "ms", middle[side], middle["alone"], "alone") for side in TRAINED),
        plain_figure(f"p99 alone again over alone ({min(noise):.2f} to {max(noise):.2f})", "x", ratio["alone again"]),
        at_most("p99 with yielding training over alone", "x", ratio["yielding"], BAR),
        plain_figure("p99 with non-yielding training over alone", "x", ratio["not yielding"]),
        more("yielding training", "steps/s", rates["yielding"], rates["training alone"], "training alone"),
        more("non-yielding training", "steps/s", rates["not yielding"], rates["training alone"], "training alone"),
        Comparison(
            "rounds in which yielding training made no step", "rounds",
            sum(not rate for rate in speed["yielding"]), None, None, None, 0, all(speed["yielding"]),
        ),
    ]  # fmt: skip


def reported_p99(server: Server, package: Path, rate: float, seconds: float, path: Path) -> float:
    """Return the p99 in milliseconds that a server reports when alone."""
    ready(server, package)
    read_latency, values = LatencyReader(path), []
    with_load = threading.Thread(target=load, args=(server, rate, seconds))
    with_load.start()
    while with_load.is_alive():
        time.sleep(1)
        latency = read_latency()
        if latency is not None and latency.answered:
            values.append(latency.p99_ms)
    with_load.join()
    # Skip the first third: the server is cold.
    return statistics.median(values[len(values) // 3 :])


def ready(server: Server, package: Path) -> None:
    server.deploy(package)
    wait(lambda: server.predict(**json.loads(ASKED)).status_code == 200, "the package", 60)


def steps_of(folder: Path, seconds: float) -> float:
    before, began = counted(folder), time.perf_counter()
    time.sleep(seconds)
    return (counted(folder) - before) / (time.perf_counter() - began)


def last(found: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {values[-1]:.2f}" for name, values in found.items())


def main() -> int:
    parser = options_parser(__doc__, "two short rounds")
    parser.add_argument("--rate", type=float, default=100.0, help="predictions a second")
    parser.add_argument("--train", nargs=2, metavar=("HEARD", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train[0], Path(options.train[1]))
        return 0
    seconds, rounds = (10.0, 2) if options.quick else (60.0, 5)
    with TemporaryDirectory(prefix="isthmus-sharing-") as folder, EmbeddedRedis(Path(folder) / "redis") as redis:
        fill(redis.url)
        comparisons = measured(Path(folder), redis.url, options.rate, seconds, rounds)
    return report("sharing", comparisons, as_json=options.json, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
