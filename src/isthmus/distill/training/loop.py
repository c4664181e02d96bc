"""The training loop, shared by all tasks; accelerate selects devices, connects processes and wraps the forward pass."""

# accelerate's wrappers of optimizers, schedules and loaders cost time in every step, and its checkpoints are pickled:
# neither is used.

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.nn.utils import clip_grad_norm_

from isthmus.distill.accelerator import enough_memory, peak
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.throttle.policy import Throttle
from isthmus.distill.training.checkpoint import Checkpoints, RunState, copy_weights, pack, pack_best, restore
from isthmus.distill.training.groups import group_problems, whole_groups
from isthmus.distill.training.parts import Parts, SplitStep, Step, TrainingRows, losses, require_same_step
from isthmus.distill.training.runlog import RunLog
from isthmus.distill.training.sharding import average_gradients, clip_gradients, is_sharded, local
from isthmus.distill.training.signals import interruption
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import ConfigurationError, GateFailed, Problem, Stopped, one_of
from isthmus.features.latency import Latency
from isthmus.features.progress import Progress, silent

LOOK = {"cpu": 1, "cuda": 8}
"""Steps between reads of losses: a read synchronizes with a GPU, but costs nothing on a CPU."""
Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""Returns the metrics of a module, which is in eval mode with gradients disabled."""


class Outcome(NamedTuple):
    """The result of `Training.train`. `paused` is the seconds of pauses since training last resumed."""

    module: nn.Module
    state: RunState
    paused: float


@dataclass(frozen=True, eq=False)
class Training:
    """A training run of a module. `run` trains the module in place and leaves it in eval mode with the best weights.

    With a `folder`, a run that was killed resumes from its last checkpoint. On the CPU of one machine, the same
    attributes give bitwise equal weights, even after a restart. A finished run returns the same result again until the
    caller removes the checkpoints with `checkpoint.discard`. Do so once the weights are stored elsewhere.

    Attributes:
        module: module whose parameters that require a gradient are trained; torch's `fully_shard` may have sharded it.
        data: training rows, visited in a new order in each epoch.
        step: function that runs the module on a batch and returns the loss and its terms.
        settings: duration, learning rate and gate (the metric that selects the best weights).
        accelerator: device, precision and processes, from `isthmus.training.accelerator`.
        evaluate: function that computes the metrics; None for no metrics. With several processes, all call it at the
            same step, and the metrics of the first process count.
        folder: folder of checkpoints and event files, visible to all processes; None to write neither.
        data_id: identity of the data; different data make a different run.
        where: name of the training for error messages.
        progress: function called with a line of text and the finished share.
        latency: function that returns the recent latency of servers on this machine, to which training yields; None to
            ignore servers. With several processes, each lowers its priority and uses fewer cores. None of them pauses,
            since the other processes would wait for it.
        groups: int64 (rows,), group number of each row, from 0; None without groups. A batch never splits a group, so
            it has up to twice as many rows as in `settings`.
    """

    module: nn.Module
    data: TrainingRows
    step: Step
    settings: TrainingSettings
    accelerator: Accelerator
    evaluate: Evaluate | None = None
    folder: Path | None = None
    data_id: str = ""
    where: str = "training"
    progress: Progress = silent
    latency: Callable[[], Latency | None] | None = None
    groups: torch.Tensor | None = None

    def run(self) -> list[dict[str, float]]:
        """Train the module in place, and leave it in eval mode with the best weights.

        With a `folder`, continue from the last checkpoint of the same run.

        Returns:
            An entry per evaluation: step, means of the loss and its terms since the previous evaluation, and metrics.

        Raises:
            ConfigurationError: settings are invalid, or `evaluate` does not return the metric `settings.gate`.
            DependencyError: memory or disk is full.
            GateFailed: a loss, a gradient or a metric is not finite.
            Stopped: SIGINT or SIGTERM arrived. The current step was finished and, with a folder, a checkpoint written.
                Signals are only handled in the main thread.
        """
        return self.train().state.history

    def train(self) -> Outcome:
        """Train like `run`, for callers that need more than the evaluations. Raise the same errors as `run`.

        Returns:
            The trained module, the final state (step, history of evaluations), and the seconds that training paused to
            make way for servers since it last resumed.
        """
        problems = self.settings.problems(self.where)
        if self.groups is not None:
            whole = isinstance(self.step, SplitStep) and self.step.whole
            processes = self.accelerator.num_processes
            problems += group_problems(self.groups, self.settings, processes, self.where, whole=whole)
        if problems:
            raise ConfigurationError(self.where, problems)
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), interruption() as signals:
            run = _Run(self, signals)
            try:
                run.resume()
                for rows in run.batches():
                    run.advance(rows)
                    run.after_step()
                if signals:  # since the last step
                    raise run.stopped()
            finally:
                run.end()
        return Outcome(self.module, run.state, run.paused)


class _Run:
    def __init__(self, training: Training, signals: list[int]) -> None:
        self.training, self.settings, self.signals = training, training.settings, signals
        self.module, self.accelerator = training.module, training.accelerator
        self.device, self.processes = self.accelerator.device, self.accelerator.num_processes
        self.rank = self.accelerator.process_index
        # The module on its device; wrapped for several processes or torch.compile.
        self.sharded = is_sharded(self.module)
        self.model: nn.Module = self.accelerator.prepare_model(self.module, evaluation_mode=self.sharded)
        self.trainable = {name: weights for name, weights in self.module.named_parameters() if weights.requires_grad}
        kinds = [[w for w in self.trainable.values() if (local(w) is w) is plain] for plain in (False, True)]
        groups = [{"params": kind} for kind in kinds if kind]  # a kernel takes either sharded weights or others
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay, fused=True
        )
        rows = len(training.data)
        self.epoch_steps, self.total = math.ceil(rows / self.settings.batch), self.settings.total(rows)
        self.state, self.best_weights = RunState(), copy_weights(self.module)
        # Loss and terms of each step since the last read, still on the device; their names; the rows of these steps.
        self.pending: list[torch.Tensor] = []
        self.names: tuple[str, ...] = ()
        self.rows = 0
        progress, folder = (silent, None) if self.rank else (training.progress, training.folder)
        self.log = RunLog(progress, self.total, folder)
        self.throttle: Throttle | None = None
        self.paused = 0.0
        self.checkpoints: Checkpoints | None = None
        if training.folder:
            self.checkpoints = Checkpoints(training.folder, self._identity(), lambda text: self.log.progress(text, 0.0))

    def _identity(self) -> str:
        return sha256({
            "settings": self.settings.identity(), "data": self.training.data_id, "rows": len(self.training.data),
            "shapes": {name: [str(value.dtype), *value.shape] for name, value in self.best_weights.items()},
            "trained": [*self.trainable],
        })  # fmt: skip

    def resume(self) -> None:
        torch.manual_seed(_seed(1, self.settings.seed, self.rank))
        if self.checkpoints and (latest := self.checkpoints.latest()):
            self.state, tensors = latest
            self.best_weights = restore(tensors, self.module, self.optimizer)
            if len(tensors["random.cpu"]) == self.processes:
                torch.set_rng_state(tensors["random.cpu"][self.rank].clone())
                if "random.cuda" in tensors and self.device.type == "cuda":
                    torch.cuda.set_rng_state(tensors["random.cuda"][self.rank].clone(), self.device)
            else:  # of another number of processes
                torch.manual_seed(_seed(2, self.settings.seed, self.rank, self.state.step))
            step = f"step {self.state.step} of {self.total}"
            self._report(f"is trained already, to {step}" if self.state.over else f"goes on after {step}")
        require_same_step(self.state.step, self.processes, self.device, self.training.where)
        if not self.state.over:
            self.log.begin(self.state.step)
        if self.training.latency:
            self.throttle = Throttle(
                self.training.latency, self._report, torch.get_num_threads(), pauses=self.processes == 1,
                slowed=self.state.slowed, paused=self.state.paused,
            )  # fmt: skip
        self.module.train()
        self.saved = time.monotonic()
        self.began = self.saved - self.state.seconds

    def batches(self) -> Iterator[torch.Tensor]:
        batch, rows = self.settings.batch, len(self.training.data)
        while not self.state.over:
            epoch, done = divmod(self.state.step, self.epoch_steps)
            generator = torch.Generator().manual_seed(_seed(0, self.settings.seed, epoch))
            if self.training.groups is None:
                parts: Sequence[torch.Tensor] = torch.split(torch.randperm(rows, generator=generator), batch)
            else:
                parts = whole_groups(self.training.groups, batch, generator)
            for part in parts[done:]:
                if self.state.over:
                    return
                yield part

    def advance(self, rows: torch.Tensor) -> None:
        state, settings = self.state, self.settings
        parts = Parts(rows, settings.accumulation, self.processes, self.rank)
        sums: list[torch.Tensor] = []
        done, count = state.step / self.total, len(parts.indexes)
        with enough_memory(
            f"{self.training.where}: step {state.step + 1}", self.device, settings, len(parts.indexes[0])
        ):
            scalars = losses(self.training.step, self.model, self.training.data, parts, done)
            for n in range(count):
                syncs = self.processes == 1 or n == count - 1
                with nullcontext() if syncs else self.accelerator.no_sync(self.model):
                    loss, terms = next(scalars)
                    before = self._versions() if self.processes > 1 and syncs and not self.sharded else []
                    # Gradients are averaged over processes.
                    (loss if self.processes == 1 else loss * self.processes).backward()
                    if before:
                        self._join(before)
                values = [*terms.values()]
                sums = [total + value for total, value in zip(sums, values, strict=True)] if sums else values
        if self.sharded:
            average_gradients(self.trainable.values(), self.processes)
        if settings.clip:
            # Measure the norm only for clipping: it takes longer than the optimizer step.
            clip = clip_gradients if self.sharded else clip_grad_norm_
            sums.append(clip(self.trainable.values(), settings.clip) / self.processes)
        rate = settings.learning_rate * settings.rate(state.step, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        names = (*terms, "gradient") if settings.clip else (*terms,)
        if self.pending and names != self.names:  # a term came or went
            self._read(stops=False, due=False)
        self.names = names
        self.pending += sums
        state.step += 1
        state.processes[self.processes] = state.processes.get(self.processes, 0) + 1
        self.rows += len(rows)

    def _versions(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self.trainable.values()]

    def _join(self, before: Sequence[int | None]) -> None:
        """Add zero to each gradient that the backward pass did not touch, since other processes wait for it."""
        pairs = zip(self.trainable.values(), before, self._versions(), strict=True)
        if unused := [(weights, was is None) for weights, was, now in pairs if was == now]:
            torch.autograd.backward([weights.sum() * 0.0 for weights, _ in unused])
            for weights, new in unused:
                if new and weights.grad is not None and not weights.grad.any():
                    weights.grad = None

    def after_step(self) -> None:
        """Do what is due after a step: read losses, evaluate, save, pause. Raise Stopped if a signal arrived."""
        state, settings, signals = self.state, self.settings, self.signals
        evaluates = state.step == self.total or state.step % (settings.evaluate_every or self.epoch_steps) == 0
        saves = settings.checkpoint_steps is not None and state.step % settings.checkpoint_steps == 0
        if not (evaluates or saves or state.step % LOOK[self.device.type] == 0):
            return
        due = time.monotonic() - self.saved >= (settings.checkpoint_seconds or math.inf)
        stops, due = self._read(bool(signals), due)
        pauses = self.throttle is not None and self.throttle.update()
        saves = saves or due or stops or pauses
        if (evaluates or saves) and not all(local(weights).isfinite().all() for weights in self.trainable.values()):
            # A non-finite gradient has ruined the weights before a loss could show it.
            raise self._failed(state.step, "a weight", {"a weight": math.nan})
        if evaluates:
            self._evaluate()
            # Obey a signal that arrived during the evaluation; several processes must agree on it in `_read` first.
            stops = stops or (self.processes == 1 and bool(signals))
        if saves or stops or state.over:
            self._save()
        if stops:
            raise self.stopped()
        if pauses and self.throttle and not state.over:
            seconds = self.throttle.pause(signals)
            self.began += seconds
            self.paused += seconds
            self.log.paused(seconds)
            if signals:
                self._save()  # with the seconds of this pause
                raise self.stopped()

    def _read(self, stops: bool, due: bool) -> tuple[bool, bool]:
        """Check the losses since the last call. Return two flags: any process must stop, any process must save."""
        state, width = self.state, len(self.names)
        values = torch.stack(self.pending)
        if self.processes > 1:
            values = torch.cat([values, values.new_tensor([stops, due])])
            distributed.all_reduce(values)
        numbers = values.tolist()
        if self.processes > 1:
            *numbers, stopping, saving = numbers
            stops, due = stopping > 0, saving > 0
        first = state.step - len(self.pending) // width
        self.pending.clear()
        for start in range(0, len(numbers), width):
            losses = dict(zip(self.names, numbers[start : start + width], strict=True))
            if not math.isfinite(sum(numbers[start : start + width])):
                # The first one is the cause: terms come before the loss, and the loss before the gradient.
                cause = next(name for name, value in losses.items() if not math.isfinite(value))
                raise self._failed(first + start // width + 1, cause, losses)
            for name in self.names:
                state.sums[name] = state.sums.get(name, 0.0) + losses[name]
            state.summed += 1
        rate = {"learning_rate": self.optimizer.param_groups[0]["lr"]}
        self.log.step(state.step, self.rows, {**losses, **rate}, self._at(state.step))
        self.rows = 0
        return stops, due

    def _evaluate(self) -> None:
        state, settings, where = self.state, self.settings, self.training.where
        metrics: dict[str, float] = {}
        if self.training.evaluate:
            if self.processes > 1:
                for buffer in self.module.buffers():  # statistics of batch norm, which each process has of its rows
                    distributed.broadcast(buffer, 0)
            self.module.eval()
            with torch.inference_mode():
                metrics = {name: float(value) for name, value in self.training.evaluate(self.module).items()}
            self.module.train()
        if self.processes > 1 and metrics:
            # Processes may differ in the last bits of metrics, but must make the same decisions.
            values = torch.tensor([*metrics.values()], dtype=torch.float64, device=self.device)
            distributed.broadcast(values, 0)
            metrics = dict(zip(metrics, values.tolist(), strict=True))
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise self._failed(state.step, wrong[0], metrics)
        if settings.gate is not None and settings.gate not in metrics:
            raise ConfigurationError(where, [Problem(f"{where}: gate", repr(settings.gate), one_of(metrics))])
        means = {name: total / state.summed for name, total in state.sums.items()}
        state.history.append({"step": state.step, **means, **metrics})
        state.sums, state.summed = {}, 0
        value = None if settings.gate is None else metrics[settings.gate]
        before = state.best
        if value is None or before is None or (value > before if settings.best == "max" else value < before):
            state.best, state.waited, self.best_weights = value, 0, copy_weights(self.module)
        else:
            state.waited += 1
        state.over = state.step == self.total or state.waited == (settings.patience or math.inf)
        self.log.evaluation(state.step, means, metrics, self._at(state.step))
        if state.over and state.step < self.total:
            better = f"no better {settings.gate} in {state.waited} evaluations"
            self._report(f"stopped early at step {state.step} of {self.total}: {better}")

    def _save(self) -> None:
        state = self.state
        state.seconds = time.monotonic() - self.began
        state.peak = max(state.peak, peak(self.device))
        if self.throttle:
            state.slowed, state.paused = self.throttle.slowed, self.throttle.paused
        if self.checkpoints is None:
            return
        random = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["random.cuda"] = torch.cuda.get_rng_state(self.device)
        for name, generator in random.items():
            generators = [generator]
            if self.processes > 1:
                generators = [torch.empty_like(generator, device=self.device) for _ in range(self.processes)]
                distributed.all_gather(generators, generator.to(self.device))
            random[name] = torch.stack(generators)
        if self.sharded or not self.rank:
            best, keep = self.best_weights, not self.rank
            tensors = pack_best(best, keep=keep) if state.over else pack(self.module, self.optimizer, best, keep=keep)
        if not self.rank:
            self.checkpoints.write(state, {**tensors, **random})
        self.accelerator.wait_for_everyone()
        self.saved = time.monotonic()

    def end(self) -> None:
        if self.throttle:
            self.throttle.end()
        self.log.end()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        for name in ("forward", "_is_accelerate_prepared"):
            self.module.__dict__.pop(name, None)
        self.optimizer.zero_grad()
        self.module.load_state_dict(self.best_weights)
        self.module.eval()

    def _report(self, text: str) -> None:
        self.log.progress(text, self.state.step / self.total)

    def _at(self, step: int) -> str:
        if self.settings.epochs:
            return f"epoch {math.ceil(step / self.epoch_steps)} of {self.settings.epochs}"
        return f"step {step} of {self.total}"

    def stopped(self) -> Stopped:
        name = Signals(self.signals[0]).name if self.signals else "a signal to another process"
        return Stopped(
            self.training.where,
            f"stopped by {name} after step {self.state.step} of {self.total}",
            self.signals[0] if self.signals else SIGTERM,
            remedy="the same command goes on from there" if self.training.folder else "",
        )

    def _failed(self, step: int, name: str, values: Mapping[str, float]) -> GateFailed:
        at = f"step {step} of {self.total}, epoch {math.ceil(step / self.epoch_steps)}"
        return GateFailed(
            self.training.where,
            f"{at}: {name} is {values[name]}",
            expected="finite losses, gradients and metrics",
            remedy="lower learning_rate, set clip, and check for extreme teacher outputs",
        )


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
