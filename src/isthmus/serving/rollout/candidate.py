"""A candidate beside the deployed model: which requests it is asked, what is counted of both, when it is given up."""

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from isthmus.features.errors import IsthmusError, PackageError
from isthmus.serving.deployment.deployment import Candidate
from isthmus.serving.predict.model import Float32, Model

LEAST = 200
"""Predictions of one row, of each of the two, before their p99 is compared."""

FAILURES = 3
"""Failed predictions before their share is compared."""

WINDOW = 1000
"""Requests of the candidate after which failures are counted anew, and seconds if there were `LEAST` of both."""

TOLERANCE = 1e-3
"""By how much an answer of a shadow may differ."""

_EVERY = 50
"""Requests of the candidate between two looks at p99."""


class Counts:
    """What one of the two has done.

    Attributes:
        requests: that it was asked.
        failures: of these, those that it had no answer for.
        seconds: of runs over one row, the latest.
    """

    def __init__(self) -> None:
        self.requests = self.failures = 0
        self.seconds: deque[float] = deque(maxlen=WINDOW)
        self._from = (0, 0)

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
        """99th percentile of a run over one row, by nearest rank; None if there was none."""
        ordered = sorted(self.seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] * 1000 if ordered else None


class Trial:
    """A candidate on trial.

    Args:
        candidate: what is tried.
        model: its model, or why there is none.

    Attributes:
        first: what the deployed model has done meanwhile.
        tried: what the candidate has done.
        compared: answers of a shadow that were compared.
        differing: of these, those that differ by more than the tolerance.
        worst: the largest difference.
        dropped: requests that a shadow was not asked, because too many waited.
        refused: why it is not asked any more; None while it is.
    """

    def __init__(self, candidate: Candidate, model: Model | IsthmusError) -> None:
        self.candidate = candidate
        self.model = model
        self.first, self.tried = Counts(), Counts()
        self.compared = self.differing = self.dropped = 0
        self.worst = 0.0
        self.refused = str(model) if isinstance(model, IsthmusError) else None
        self._salt = candidate.deployment.digest.encode()

    @property
    def role(self) -> Literal["shadow", "canary"]:
        """What it is."""
        return "canary" if self.candidate.share else "shadow"

    def takes(self, names: Iterable[str], keys: Mapping[str, Sequence[Any]], body: bytes) -> bool:
        """Whether the candidate answers a request: always the same for the same join keys of its first row.

        Args:
            names: the join keys that the deployed model reads.
            keys: join key to its values.
            body: the request, which counts where there is no key.
        """
        row = [(name, keys[name][0]) for name in sorted(names) if keys[name]]
        named = repr(row).encode() if row else body
        place = int.from_bytes(hashlib.blake2b(self._salt + named, digest_size=8).digest()) / 2**64
        return place < self.candidate.share

    def compare(self, first: Float32, tried: Float32) -> bool:
        """Compares two answers to one request, shape (n,) each; returns whether they are the same within tolerance."""
        both = np.isnan(first) & np.isnan(tried)
        with np.errstate(invalid="ignore"):
            apart = np.where(both, 0.0, np.abs(first.astype(np.float64) - tried.astype(np.float64)))
        # Where one of the two alone has no number, nothing is close to it.
        apart = np.where(np.isnan(apart) & (first != tried), np.inf, np.nan_to_num(apart, nan=0.0, posinf=np.inf))
        worst = float(apart.max(initial=0.0))
        self.compared += len(apart)
        self.differing += int(np.count_nonzero(apart > TOLERANCE))
        self.worst = max(self.worst, worst)
        return worst <= TOLERANCE

    def judge(self) -> None:
        """Gives a canary up that fails more often than the deployed model, or is slower than it may be."""
        if self.refused is not None or self.role == "shadow":
            return
        (asked, failed), (others, theirs) = self.tried.window, self.first.window
        if failed >= FAILURES and failed * max(others, 1) > theirs * asked:
            self.refused = (
                f"{failed:,} of {asked:,} of its predictions failed, and {theirs:,} of {others:,} of those of the "
                "deployed model"
            )
        elif asked % _EVERY == 0 and self._timed:
            self._judge_latency()
        if asked >= WINDOW:
            # Large shares, and requests of many rows, leave one of the two few seconds: kept until there are enough.
            timed = self._timed
            for one in (self.first, self.tried):
                one.reopen()
                if timed:
                    one.seconds.clear()

    @property
    def _timed(self) -> bool:
        return min(len(self.tried.seconds), len(self.first.seconds)) >= LEAST

    def _judge_latency(self) -> None:
        objective = self.candidate.latency_objective_ms
        tried, first = self.tried.p99_ms, self.first.p99_ms
        if tried is not None and first is not None and tried > objective >= first:
            self.refused = (
                f"the p99 of its predictions of one row is {tried:.3g} ms, above the objective of {objective:g} ms, "
                f"and that of the deployed model is {first:.3g} ms"
            )


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a candidate was given up, for the other workers and for `isthmus`.

    Attributes:
        digest: its package.
        deployed_at: when it became a candidate, in microseconds since 1970 UTC.
        at: when it was given up, likewise.
        why: the reason, in words.
    """

    digest: str
    deployed_at: int
    at: int
    why: str

    def about(self, candidate: Candidate) -> bool:
        """Whether it is about this candidate, and not about an earlier one."""
        deployment = candidate.deployment
        return (self.digest, self.deployed_at) == (deployment.digest, deployment.deployed_at)

    def dumps(self) -> bytes:
        """The decision as a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str) -> "Decision":
        """The inverse of `dumps`.

        Raises:
            PackageError: the text is no decision.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise PackageError(where, f"is no decision ({error})", remedy="remove the file") from error


def decision_file(deployment: Path) -> Path:
    """Where the decision about the candidate of a deployment file is."""
    return deployment.with_name("candidate.refused.json")


def decided(deployment: Path, candidate: Candidate) -> Decision | None:
    """The decision about a candidate; None if there is none that can be read."""
    file = decision_file(deployment)
    try:
        found = Decision.loads(file.read_bytes(), str(file))
    except (OSError, PackageError):
        return None
    return found if found.about(candidate) else None
