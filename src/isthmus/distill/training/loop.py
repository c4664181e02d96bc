"""The training loop: one, for all tasks.

accelerate chooses the device, joins the processes, and wraps the module's forward pass for bf16, torch.compile and
gradients that are averaged over processes. Its wrappers of optimizers, schedules and loaders are left out: they cost
time in every step, and what they wrap is a few lines here. So are its checkpoints, which are pickled.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.nn.utils import clip_grad_norm_

from isthmus.distill.device import enough_memory, peak
from isthmus.distill.progress import Account
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.throttle.policy import Throttle
from isthmus.distill.training.checkpoint import Checkpoints, RunState, captured, copied, restored
from isthmus.distill.training.signals import interruption
from isthmus.features.contract.contract import one_of, sha256
from isthmus.features.errors import ConfigurationError, GateFailed, Problem, Stopped
from isthmus.features.latency import Latency
from isthmus.features.progress import Progress

LOOK = {"cpu": 1, "cuda": 8}
"""Steps after which their losses are looked at: a look waits for a GPU, and costs nothing on a CPU."""
Step = Callable[[nn.Module, Any, float], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""Takes the module, a batch and the share of training that is done; gives the loss, which is a mean over the rows, and
its detached terms by name."""
Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""The metrics of a module, which is in eval mode and records no gradients."""


class Rows(Protocol):
    """What is learned from."""

    def __len__(self) -> int:
        """How many rows there are."""

    def __getitem__(self, rows: torch.Tensor, /) -> Any:
        """The batch of the rows at these indexes, int64 (n,) on the CPU, on the device of the training."""


@dataclass(eq=False)
class Training:
    """A module in training. `run` trains it in place, and leaves it in eval mode with the best weights so far.

    On one machine's CPU, the same attributes give the same weights to the bit, however often the run was killed and
    begun again: with a folder, it goes on from its last checkpoint. The caller removes that (`checkpoint.discard`) once
    what was trained is safe elsewhere; a run that is over gives the same again until then.

    Attributes:
        module: what is trained: all its parameters that require a gradient.
        data: rows to learn from, put into a new order for each epoch.
        step: the loss of a batch. It calls the module, and names the same terms each time.
        settings: how.
        accelerator: device, precision and processes (`device.accelerator`).
        evaluate: gives the metrics; with several processes those of the first count.
        folder: of the run's checkpoints and event files; None for neither. All processes must see it.
        data_id: what identifies the data: another one is another run.
        where: what errors call this training.
        progress: told where it stands, and the share that is done.
        latency: what servers on this machine answered of late, to which it gives way; None if there is none. Of several
            processes each lowers its priority and takes fewer cores, but none pauses: the others would wait for it.
    """

    module: nn.Module
    data: Rows
    step: Step
    settings: TrainingSettings
    accelerator: Accelerator
    evaluate: Evaluate | None = None
    folder: Path | None = None
    data_id: str = ""
    where: str = "training"
    progress: Progress = lambda _text, _done: None
    latency: Callable[[], Latency | None] | None = None

    def run(self) -> list[dict[str, float]]:
        """Trains to the end.

        Returns:
            For each evaluation its step, the mean loss and terms since the one before, and the metrics.

        Raises:
            ConfigurationError: settings are wrong, or there is no such gate.
            DependencyError: memory or the disk is full.
            GateFailed: a loss, a gradient or a metric is not finite.
            Stopped: SIGINT or SIGTERM; the step at hand was finished and a checkpoint written. Only the main thread
                takes signals.
        """
        if problems := self.settings.problems(self.where):
            raise ConfigurationError(self.where, problems)
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), interruption() as signals:
            self._prepare()
            try:
                self._resume()
                for rows in self._batches():
                    self._advance(rows)
                    self._attend(signals)
                if signals:  # since the last step
                    raise self._stopped(signals)
            finally:
                self._end()
        return self.standing.history

    def _prepare(self) -> None:
        """Module, optimizer and everything a run counts, as they are before the first step."""
        settings, joined = self.settings, self.accelerator
        self.processes, self.place = joined.num_processes, joined.process_index
        # The same module on its device, unless several processes or torch.compile put another one around it.
        self.model: nn.Module = joined.prepare_model(self.module)
        self.trained = {name: weights for name, weights in self.module.named_parameters() if weights.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self.epoch_steps = math.ceil(len(self.data) / settings.batch)
        self.total = settings.total(len(self.data))
        self.standing, self.kept = RunState(), copied(self.module)
        self.pending: list[torch.Tensor] = []
        self.names: tuple[str, ...] = ()
        self.seen = 0
        heard = not self.place
        self.account = Account(
            self.progress if heard else lambda _text, _done: None, self.total, self.folder if heard else None
        )
        self.giving: Throttle | None = None
        self.checkpoints: Checkpoints | None = None
        if self.folder:
            identity = sha256({
                "settings": settings.identity(), "data": self.data_id, "rows": len(self.data),
                "shapes": {name: [str(value.dtype), *value.shape] for name, value in self.kept.items()},
                "trained": [*self.trained], "processes": self.processes,
            })  # fmt: skip
            self.checkpoints = Checkpoints(self.folder, identity, lambda text: self.account.progress(text, 0.0))

    def _resume(self) -> None:
        """Begins, or takes up where the last checkpoint stands."""
        device = self.accelerator.device
        torch.manual_seed(_seed(1, self.settings.seed, self.place))
        if self.checkpoints and (found := self.checkpoints.latest()):
            self.standing, tensors = found
            self.kept = restored(tensors, self.module, self.optimizer)
            torch.set_rng_state(tensors["random.cpu"][self.place].clone())
            if "random.cuda" in tensors and device.type == "cuda":
                torch.cuda.set_rng_state(tensors["random.cuda"][self.place].clone(), device)
            step = self.standing.step
            self.account.progress(f"goes on after step {step} of {self.total}", step / self.total)
        if not self.standing.over:
            self.account.begin(self.standing.step)
        if self.latency:
            self.giving = Throttle(
                self.latency, self._tell, torch.get_num_threads(), pauses=self.processes == 1,
                slowed=self.standing.slowed, paused=self.standing.paused,
            )  # fmt: skip
        self.module.train()
        self.waited, self.saved = 0.0, time.monotonic()
        self.begun = self.saved - self.standing.seconds

    def _batches(self) -> Iterator[torch.Tensor]:
        """The rows of each step that is left: every epoch has an order that follows from the seed and its number."""
        batch, standing = self.settings.batch, self.standing
        while not standing.over:
            epoch, taken = divmod(standing.step, self.epoch_steps)
            generator = torch.Generator().manual_seed(_seed(0, self.settings.seed, epoch))
            order = torch.randperm(len(self.data), generator=generator)
            for first in range(taken * batch, len(order), batch):
                if standing.over:
                    return
                yield order[first : first + batch]

    def _advance(self, rows: torch.Tensor) -> None:
        """One step of the optimizer, on this process's share of the rows, part by part."""
        standing, settings = self.standing, self.settings
        share = rows if self.processes == 1 else rows.tensor_split(self.processes)[self.place]
        # A process without rows takes part all the same: the others wait for its gradients, which are zero.
        parts = share.tensor_split(min(settings.accumulation, len(share))) if len(share) else (rows[:1],)
        found: list[torch.Tensor] = []
        with enough_memory(f"{self.where}: step {standing.step + 1}", self.accelerator.device, settings, len(parts[0])):
            for n, part in enumerate(parts):
                weight = len(part) / len(rows) if len(share) else 0.0
                alone = self.processes == 1 or n == len(parts) - 1
                with nullcontext() if alone else self.accelerator.no_sync(self.model):
                    loss, terms = self.step(self.model, self.data[part], standing.step / self.total)
                    # Gradients are averaged over the processes, and each has its share of the batch.
                    (loss if weight == 1 else loss * (weight * self.processes)).backward()
                values = [*terms.values(), loss.detach()]
                if weight != 1:
                    values = [value * weight for value in values]
                found = [one + other for one, other in zip(found, values, strict=True)] if found else values
        if settings.clip:
            # Not measured otherwise: that takes longer than the optimizer does.
            found.append(clip_grad_norm_(self.trained.values(), settings.clip) / self.processes)
        rate = settings.learning_rate * settings.rate(standing.step, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.names = (*terms, "loss", "gradient") if settings.clip else (*terms, "loss")
        self.pending += found
        standing.step += 1
        self.seen += len(rows)

    def _attend(self, signals: list[int]) -> None:
        """What comes between two steps, if it is time: look at the losses, evaluate, keep, tell, stop."""
        standing, settings = self.standing, self.settings
        evaluates = standing.step == self.total or standing.step % (settings.evaluate_every or self.epoch_steps) == 0
        saves = settings.checkpoint_steps is not None and standing.step % settings.checkpoint_steps == 0
        if not (evaluates or saves or standing.step % LOOK[self.accelerator.device.type] == 0):
            return
        due = time.monotonic() - self.saved >= (settings.checkpoint_seconds or math.inf)
        stops, due = self._look(bool(signals), due)
        pauses = self.giving is not None and self.giving.look()
        saves = saves or due or stops or pauses
        if (evaluates or saves) and not all(weights.isfinite().all() for weights in self.trained.values()):
            # A gradient that was not finite has ruined them before any loss could tell.
            raise self._failed(standing.step, "a weight", {"a weight": math.nan})
        if evaluates:
            self._evaluate()
            # What comes meanwhile does not wait for another step; several processes have to agree on it first.
            stops = stops or (self.processes == 1 and bool(signals))
        if saves or stops or standing.over:
            self._save()
        if stops:
            raise self._stopped(signals)
        if pauses and self.giving and not standing.over:
            seconds = self.giving.pause(signals)
            self.begun += seconds
            self.waited += seconds
            self.account.paused(seconds)
            if signals:
                self._save()  # how long it has paused
                raise self._stopped(signals)

    def _look(self, stops: bool, due: bool) -> tuple[bool, bool]:
        """Judges the steps since the last look; what any process was told to do, all do."""
        standing, width = self.standing, len(self.names)
        values = torch.stack(self.pending)
        if self.processes > 1:
            values = torch.cat([values, values.new_tensor([stops, due])])
            distributed.all_reduce(values)
        read = values.tolist()
        if self.processes > 1:
            *read, stopping, saving = read
            stops, due = stopping > 0, saving > 0
        first = standing.step - len(self.pending) // width
        self.pending.clear()
        for start in range(0, len(read), width):
            found = dict(zip(self.names, read[start : start + width], strict=True))
            step = first + start // width + 1
            if not math.isfinite(sum(read[start : start + width])):
                # The first is the cause: the loss is not finite because of a term, the gradient because of the loss.
                raise self._failed(step, next(name for name, one in found.items() if not math.isfinite(one)), found)
            for name in self.names:
                standing.sums[name] = standing.sums.get(name, 0.0) + found[name]
            standing.summed += 1
        rate = {"learning_rate": self.optimizer.param_groups[0]["lr"]}
        self.account.step(standing.step, self.seen, {**found, **rate}, self._at(standing.step))
        self.seen = 0
        return stops, due

    def _evaluate(self) -> None:
        """Measures the module, keeps its weights if they are the best, and decides whether it goes on."""
        standing, settings = self.standing, self.settings
        metrics: dict[str, float] = {}
        if self.evaluate:
            self.module.eval()
            with torch.inference_mode():
                metrics = {name: float(value) for name, value in self.evaluate(self.module).items()}
            self.module.train()
        if self.processes > 1 and metrics:
            # In their last bits the processes may differ, but not in what follows.
            values = torch.tensor([*metrics.values()], dtype=torch.float64, device=self.accelerator.device)
            distributed.broadcast(values, 0)
            metrics = dict(zip(metrics, values.tolist(), strict=True))
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise self._failed(standing.step, wrong[0], metrics)
        if settings.gate is not None and settings.gate not in metrics:
            problem = Problem(f"{self.where}: gate", repr(settings.gate), one_of(metrics))
            raise ConfigurationError(self.where, [problem])
        means = {name: total / standing.summed for name, total in standing.sums.items()}
        standing.history.append({"step": standing.step, **means, **metrics})
        standing.sums, standing.summed = {}, 0
        value = None if settings.gate is None else metrics[settings.gate]
        before = standing.best
        if value is None or before is None or (value > before if settings.best == "max" else value < before):
            standing.best, standing.waited, self.kept = value, 0, copied(self.module)
        else:
            standing.waited += 1
        standing.over = standing.step == self.total or standing.waited == (settings.patience or math.inf)
        self.account.evaluation(standing.step, means, metrics, self._at(standing.step))

    def _save(self) -> None:
        """Writes a checkpoint: one process for all of them."""
        self.standing.seconds = time.monotonic() - self.begun
        self.standing.peak = max(self.standing.peak, peak(self.accelerator.device))
        if self.giving:
            self.standing.slowed, self.standing.paused = self.giving.slowed, self.giving.paused
        if self.checkpoints is None:
            return
        device = self.accelerator.device
        random = {"random.cpu": torch.get_rng_state()}
        if device.type == "cuda":
            random["random.cuda"] = torch.cuda.get_rng_state(device)
        for name, state in random.items():
            states = [state]
            if self.processes > 1:
                states = [torch.empty_like(state, device=device) for _ in range(self.processes)]
                distributed.all_gather(states, state.to(device))
            random[name] = torch.stack(states)
        if not self.place:
            self.checkpoints.write(self.standing, {**captured(self.module, self.optimizer, self.kept), **random})
        self.accelerator.wait_for_everyone()
        self.saved = time.monotonic()

    def _end(self) -> None:
        """The best weights so far, in the module as it came."""
        if self.giving:
            self.giving.end()
        self.account.end()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        for name in ("forward", "_is_accelerate_prepared"):
            self.module.__dict__.pop(name, None)
        self.optimizer.zero_grad()
        self.module.load_state_dict(self.kept)
        self.module.eval()

    def _tell(self, text: str) -> None:
        self.account.progress(text, self.standing.step / self.total)

    def _at(self, step: int) -> str:
        if self.settings.epochs:
            return f"epoch {math.ceil(step / self.epoch_steps)} of {self.settings.epochs}"
        return f"step {step} of {self.total}"

    def _stopped(self, signals: list[int]) -> Stopped:
        name = Signals(signals[0]).name if signals else "a signal to another process"
        return Stopped(
            self.where,
            f"stopped by {name} after step {self.standing.step} of {self.total}",
            signals[0] if signals else SIGTERM,
            remedy="the same command goes on from there" if self.folder else "",
        )

    def _failed(self, step: int, name: str, values: Mapping[str, float]) -> GateFailed:
        at = f"step {step} of {self.total}, epoch {math.ceil(step / self.epoch_steps)}"
        remedy = "lower learning_rate, set clip, and look for extreme teacher outputs"
        return GateFailed(
            self.where,
            f"{at}: {name} is {values[name]}",
            expected="finite losses, gradients and metrics",
            remedy=remedy,
        )


def _seed(*parts: int) -> int:
    """A seed that follows from several numbers and looks like none of them."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
