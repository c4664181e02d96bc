"""Recorded answers of models of tensors, computed again: one request at a time, as they were asked."""

from collections.abc import Iterator

import msgspec
import pyarrow as pa

from isthmus.features.errors import IsthmusError
from isthmus.orchestration.recording.causes import Cause, Causes
from isthmus.orchestration.recording.requests import LIMITS, read_tensors
from isthmus.serving.predict.tensors import TensorPredictor
from isthmus.serving.recorder.digest import tensors_digest


def differing(
    answers: pa.Table, predictor: TensorPredictor, causes: Causes, *, another: bool
) -> Iterator[tuple[int, Cause, str]]:
    """The places of answers that are not as they were recorded, each with its cause.

    `another` is whether the predictor has a package that is asked instead of the one that answered.
    """
    columns = [answers[name].to_pylist() for name in ("request", "digest", "package", "runtime")]
    for place, (text, (then,), package, runtime) in enumerate(zip(*columns, strict=True)):
        try:
            _, inputs, _ = predictor.read(read_tensors(text.encode()), LIMITS)
            now = tensors_digest(predictor.model.run(inputs.feeds, inputs.outputs))
        except (IsthmusError, msgspec.MsgspecError) as error:
            yield place, Cause.PACKAGE, f"package {predictor.model.deployment.digest[:12]} does not answer: {error}"
            continue
        if now == then % (1 << 64):
            continue
        if another:
            digest = predictor.model.deployment.digest
            yield place, Cause.PACKAGE, f"package {digest[:12]} says other tensors than {package[:12]} said"
        else:
            yield place, Cause.ENGINE, f"the model says other tensors: {causes.runtimes(runtime)}"
