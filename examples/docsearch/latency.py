"""Print the latency of teacher and student for one text in ONNX Runtime, on one thread: `python latency.py`."""

import sys
from functools import partial

import numpy as np
from encoder import Embedder, exported, student
from search import PASSAGE, SHAPE, minilm

from isthmus.evaluation import interleaved
from isthmus.inference import predict, session
from isthmus.teachers import pretrained


def main() -> None:
    """Print a line per number of tokens. The student is untrained, because weights do not change its latency."""
    teacher = pretrained(minilm(), ["embedding"]).module
    counts = np.zeros(teacher.config.vocab_size)
    models = {
        "teacher": Embedder(teacher),
        "student": student(teacher, positions=PASSAGE, counts=counts, **SHAPE),
    }
    sizes = {name: sum(weights.numel() for weights in model.parameters()) for name, model in models.items()}
    opened = {name: session(exported(model).SerializeToString(), 1) for name, model in models.items()}
    say(f"parameters: {sizes['student']:,} of {sizes['teacher']:,}, {sizes['student'] / sizes['teacher']:.1%}")
    for length in (16, 32, PASSAGE):
        one = np.ones((1, length), np.int64)
        fed = {"input_ids": one * 2000, "attention_mask": one}
        times = interleaved({name: partial(predict, graph, fed) for name, graph in opened.items()})
        slow, fast = times["teacher"]["p50_us"], times["student"]["p50_us"]
        say(f"{length} tokens: teacher {slow:,.0f} us, student {fast:,.0f} us at the median, {slow / fast:.1f} times")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
