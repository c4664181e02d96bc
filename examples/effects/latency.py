"""Print the latency of teacher and student for one frame in ONNX Runtime, on one thread: `python latency.py`."""

import sys
from functools import partial

import numpy as np
from effects import Effects
from networks import Generator, Painter, exported, multiply_adds
from photographs import SIDE

from isthmus.evaluation import interleaved
from isthmus.inference import predict, session


def main() -> None:
    """Print a line per model. The models are untrained, because weights do not change the latency."""
    models = {"teacher": Generator(**Effects.generator_shape), "student": Painter(**Effects.shape)}
    fed = {"frame": np.random.default_rng(0).random((1, 3, SIDE, SIDE), np.float32)}
    opened = {name: session(exported(model).SerializeToString(), 1) for name, model in models.items()}
    times = interleaved({name: partial(predict, graph, fed) for name, graph in opened.items()}, rounds=2, calls=200)
    for name, model in models.items():
        weights = sum(part.numel() for part in model.parameters())
        costs = f"{weights:,} weights, {multiply_adds(model) / 1e6:,.0f} million multiply-adds"
        p50, p99 = (times[name][key] / 1000 for key in ("p50_us", "p99_us"))
        sys.stdout.write(f"{name}: {costs}, {p50:.1f} ms at the median, p99 {p99:.1f}\n")


if __name__ == "__main__":
    main()
