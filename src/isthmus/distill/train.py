"""The training loop: one, for the student and for the control."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isthmus.distill.declaration import Distillation
from isthmus.distill.evaluate import auc
from isthmus.distill.losses import distillation_loss
from isthmus.distill.student import Student
from isthmus.features.errors import DependencyError, GateFailed
from isthmus.features.profiles import TrainingProfile

WARM_UP = 0.1
"""Share of the steps over which the learning rate rises; over the others it falls along a cosine."""

ROWS_PER_THREAD = 4096
"""A smaller share of a batch is not worth a thread: with batches of 1024 rows two threads gain nothing on two free
cores and are ten times slower when another process holds one of them."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class Examples:
    """Rows to learn from: numbers (n, f) and category indexes (n, k), labels (n,), the teacher's logits (n,)."""

    numeric: torch.Tensor
    categories: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor

    def to(self, device: torch.device) -> "Examples":
        """The same rows on a device."""
        return Examples(
            self.numeric.to(device), self.categories.to(device), self.labels.to(device), self.teacher.to(device)
        )

    def __len__(self) -> int:
        return len(self.labels)


def train(
    student: Student,
    examples: Examples,
    validation: Examples,
    declaration: Distillation,
    profile: TrainingProfile,
    progress: Progress,
) -> list[dict[str, float]]:
    """Trains a student in place and leaves it with the weights of the epoch of best validation AUC, on the CPU.

    On one machine's CPU, the same arguments give the same weights to the bit.

    Returns:
        Loss and validation AUC of each epoch.

    Raises:
        DependencyError: the profile asks for what this machine lacks.
        GateFailed: a loss is not finite; the student keeps the best weights it had.
    """
    device, precision = resolve(profile)
    student.to(device)
    examples, validation = examples.to(device), validation.to(device)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=declaration.learning_rate, weight_decay=declaration.weight_decay, fused=True
    )
    steps = math.ceil(len(examples) / profile.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps * profile.epochs))
    best, best_auc = copy.deepcopy(student.state_dict()), -1.0
    epochs: list[dict[str, float]] = []
    with (
        _threads(min(profile.threads, 1 + profile.batch // ROWS_PER_THREAD)),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        torch.manual_seed(declaration.seed)
        for epoch in range(profile.epochs):
            student.train()
            total = torch.zeros((), device=device)
            for rows in torch.split(torch.randperm(len(examples), device=device), profile.batch):
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                    logits = student(examples.numeric[rows], examples.categories[rows])
                loss = distillation_loss(
                    logits.float(),
                    examples.labels[rows],
                    examples.teacher[rows],
                    temperature=declaration.temperature,
                    soft_weight=declaration.soft_weight,
                )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                total += loss.detach()
            student.eval()
            with torch.inference_mode():
                scores = student(validation.numeric, validation.categories).cpu().numpy()
            mean = total.item() / steps
            if not (math.isfinite(mean) and np.isfinite(scores).all()):
                _restore(student, best)
                raise GateFailed(
                    f"distillation {declaration.name}: epoch {epoch + 1} of {profile.epochs}",
                    f"the mean loss is {mean}" if not math.isfinite(mean) else "the student's answers are not finite",
                    expected="a finite loss and finite answers",
                    remedy="lower learning_rate, and look for extreme teacher outputs",
                )
            score = auc(validation.labels.cpu().numpy(), scores)
            epochs.append({"loss": mean, "validation_auc": score})
            if score > best_auc:
                best, best_auc = copy.deepcopy(student.state_dict()), score
            progress(f"epoch {epoch + 1}: validation AUC {score:.4f}", (epoch + 1) / profile.epochs)
    _restore(student, best)
    return epochs


def rate(step: int, total: int) -> float:
    """Share of the largest learning rate at a step: a linear rise, then half a cosine down to zero."""
    rise = max(1, round(WARM_UP * total))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise + 1) / (total - rise + 1)))


def resolve(profile: TrainingProfile) -> tuple[torch.device, str]:
    """The device and precision of a profile on this machine.

    Raises:
        DependencyError: there is no CUDA device, or the device has no bf16.
    """
    where = "profiles.training"
    if profile.device == "cuda" and not torch.cuda.is_available():
        raise DependencyError(
            f"{where}.device",
            '"cuda", but torch sees no CUDA device',
            expected="a CUDA device and a CUDA build of torch",
            remedy='set device = "cpu" or "auto", or install a driver and a CUDA build of torch',
        )
    device = torch.device("cuda" if profile.device != "cpu" and torch.cuda.is_available() else "cpu")
    if profile.precision == "bf16" and not _has_bf16(device):
        raise DependencyError(
            f"{where}.precision",
            f'"bf16", but this {device.type} has no bf16 arithmetic',
            expected="a device with bf16",
            remedy='set precision = "fp32"',
        )
    return device, profile.precision


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _restore(student: Student, state: dict[str, Any]) -> None:
    student.load_state_dict(state)
    student.cpu().eval()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
