"""A candidate beside the deployed model: which requests it gets, what is counted of both, when it is given up."""

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from isthmus.features.errors import IsthmusError, PackageError
from isthmus.serving.deployment.deployment import Candidate
from isthmus.serving.predict.model import Float32, Model

LEAST = 200
"""Predictions of a single row, of each model, before their p99 is compared."""

FAILURES = 3
"""Failed predictions before their share is compared."""

WINDOW = 1000
"""Requests of the candidate after which failures are counted anew, and seconds if both have `LEAST`."""

TOLERANCE = 1e-3
"""By how much an answer of a shadow may differ."""

_EVERY = 50
"""Requests of the candidate between two looks at p99."""


@dataclass(eq=False)
class Counts:
    """The requests that a model got, the failures among them, and the seconds of its latest runs over a single row."""

    requests: int = 0
    failures: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _from: tuple[int, int] = 0, 0

    def count(self, rows: int, seconds: float | None) -> None:
        """A request was answered after so many seconds of its model, or not: None."""
        self.requests += 1
        if seconds is None:
            self.failures += 1
        elif rows == 1:
            self.seconds.append(seconds)

    @property
    def window(self) -> tuple[int, int]:
        """Requests and failures since the window was opened."""
        return self.requests - self._from[0], self.failures - self._from[1]

    def reopen(self) -> None:
        """Opens the next window, for failures."""
        self._from = self.requests, self.failures

    @property
    def p99_ms(self) -> float | None:
        """99th percentile of a run over a single row, by nearest rank; None if there was no run."""
        ordered = sorted(self.seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] * 1000 if ordered else None


class CandidateRun:
    """A candidate in a worker, beside the deployed model.

    Attributes:
        deployed: what the deployed model has done meanwhile.
        compared: answers of a shadow that were compared; `differing` of them differ by more than the tolerance.
        dropped: requests that a shadow did not get, because too many waited.
        refused: why it gets no more requests; None while it does.
    """

    def __init__(self, candidate: Candidate, model: Model | IsthmusError) -> None:
        self.candidate = candidate
        self.model = model
        self.deployed, self.counts = Counts(), Counts()
        self.compared = self.differing = self.dropped = 0
        self.worst = 0.0
        self.refused = str(model) if isinstance(model, IsthmusError) else None
        self._salt = candidate.deployment.digest.encode()

    @property
    def role(self) -> Literal["shadow", "canary"]:
        """A canary answers requests; a shadow is only compared."""
        return "canary" if self.candidate.share else "shadow"

    def picks(self, names: Iterable[str], keys: Mapping[str, Sequence[Any]], body: bytes) -> bool:
        """Whether the candidate answers a request.

        It depends on the values that the join keys `names` have in the first row, or on the body where there are none.
        """
        row = [(name, keys[name][0]) for name in sorted(names) if keys[name]]
        named = repr(row).encode() if row else body
        place = int.from_bytes(hashlib.blake2b(self._salt + named, digest_size=8).digest()) / 2**64
        return place < self.candidate.share

    def compare(self, deployed: Float32, candidate: Float32) -> bool:
        """Compares two answers to a request, shape (n,) each; returns whether they are the same within tolerance."""
        both = np.isnan(deployed) & np.isnan(candidate)
        with np.errstate(invalid="ignore"):
            gap = np.where(both, 0.0, np.abs(deployed.astype(np.float64) - candidate.astype(np.float64)))
        # Where only a single answer is a number, nothing is close to it.
        gap = np.where(np.isnan(gap) & (deployed != candidate), np.inf, np.nan_to_num(gap, nan=0.0, posinf=np.inf))
        worst = float(gap.max(initial=0.0))
        self.compared += len(gap)
        self.differing += int(np.count_nonzero(gap > TOLERANCE))
        self.worst = max(self.worst, worst)
        return worst <= TOLERANCE

    def judge(self) -> None:
        """Gives a canary up that fails more often than the deployed model, or is slower than it may be."""
        if self.refused is not None or self.role == "shadow":
            return
        (requests, failures), (deployed, failed) = self.counts.window, self.deployed.window
        if failures >= FAILURES and failures * max(deployed, 1) > failed * requests:
            self.refused = (
                f"{failures:,} of {requests:,} of its predictions failed, and {failed:,} of {deployed:,} of those of "
                "the deployed model"
            )
        elif requests % _EVERY == 0 and self._timed:
            self._judge_latency()
        if requests >= WINDOW:
            # Large shares, and requests of many rows, time few runs of either model: those stay until there are enough.
            timed = self._timed
            for counts in (self.deployed, self.counts):
                counts.reopen()
                if timed:
                    counts.seconds.clear()

    @property
    def _timed(self) -> bool:
        return min(len(self.counts.seconds), len(self.deployed.seconds)) >= LEAST

    def _judge_latency(self) -> None:
        objective = self.candidate.latency_objective_ms
        own, deployed = self.counts.p99_ms, self.deployed.p99_ms
        if own is not None and deployed is not None and own > objective >= deployed:
            self.refused = (
                f"the p99 of its predictions of one row is {own:.3g} ms, above the objective of {objective:g} ms, "
                f"and that of the deployed model is {deployed:.3g} ms"
            )


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a candidate was given up, for the other workers and for `isthmus`; times are microseconds since 1970 UTC."""

    digest: str
    deployed_at: int
    at: int
    why: str

    def about(self, candidate: Candidate) -> bool:
        """Whether it is about this candidate, and not about an earlier candidate."""
        deployment = candidate.deployment
        return (self.digest, self.deployed_at) == (deployment.digest, deployment.deployed_at)

    def dumps(self) -> bytes:
        """The decision as a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str) -> "Decision":
        """The inverse of `dumps`."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise PackageError(where, f"is no decision ({error})", remedy="remove the file") from error


def decision_file(deployment: Path) -> Path:
    """Where the decision about the candidate of a deployment file is."""
    return deployment.with_name("candidate.refused.json")


def read_decision(deployment: Path, candidate: Candidate) -> Decision | None:
    """The decision about a candidate; None if there is none, or it cannot be read."""
    file = decision_file(deployment)
    try:
        decision = Decision.loads(file.read_bytes(), str(file))
    except (OSError, PackageError):
        return None
    return decision if decision.about(candidate) else None
