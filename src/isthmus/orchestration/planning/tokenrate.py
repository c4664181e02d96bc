"""Estimated tokens per second of a causal language model, for prefill and decoding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isthmus.distill.language.causal import Causal
from isthmus.distill.language.decoding import PRECISIONS, Precision
from isthmus.features.errors import extra
from isthmus.orchestration.artifacts import Artifacts, read_json
from isthmus.orchestration.planning.devices import HOST, Device
from isthmus.orchestration.planning.roofline import TimeEstimate, Work, roofline
from isthmus.package.generation.decoder import PART
from isthmus.package.manifest import WHOLE, Manifest

if TYPE_CHECKING:
    from isthmus.distill.decoder.probes import Speed
    from isthmus.distill.decoder.work import Sizes

Probe = Callable[["Sizes", Precision, int, int], "Speed"]
"""Measures this host. Arguments: model sizes, precision, number of threads, number of prompt tokens."""


def probe(sizes: "Sizes", precision: Precision, threads: int, prompt: int) -> "Speed":
    with extra("text"):
        from isthmus.distill.decoder.probes import Probes
    return Probes(sizes, precision, threads, prompt).speed()


@dataclass(frozen=True)
class TextModel:
    """A causal language model and its package: `files` for ONNX Runtime by precision, `others` for other runtimes.

    `served` has the precision and the seconds of a decoding step after `prompt` tokens, as measured by export.
    """

    sizes: "Sizes"
    prompt: int
    files: Mapping[Precision, list[str]]
    others: list[str]
    served: tuple[str, float]

    @classmethod
    def of(cls, artifacts: Artifacts, manifest: Manifest, serving: Mapping[str, Any]) -> "TextModel | None":
        task = artifacts.declared.task
        if not isinstance(task, Causal):
            return None
        with extra("text"):
            from isthmus.distill.decoder.work import Sizes
        config = artifacts.models / manifest.model / "config.json"
        files = {
            precision: [each.file for each in manifest.variants if each.precision == precision and each.format in WHOLE]
            for precision in PRECISIONS
        }
        return cls(
            sizes=Sizes.of(read_json(config, "distill"), str(config)),
            prompt=task.context // 2,
            files={precision: names for precision, names in files.items() if names},
            others=[each.file for each in manifest.variants if each.format not in WHOLE],
            served=(serving["precision"], serving["p50_us"] / 1e6),
        )

    def plan(self, devices: Mapping[str, Device], threads: int, measure: Probe = probe) -> dict[str, Any]:
        left_out = {name: "the serving runtime needs a CPU" for name, each in devices.items() if each.kind != "cpu"}
        left_out |= dict.fromkeys(self.others, "its runtime is not measured")
        cpus = {name: device.part(threads) for name, device in devices.items() if name not in left_out}
        precisions = {
            precision: {"files": names, **self._precision(measure(self.sizes, precision, threads, self.prompt), cpus)}
            for precision, names in self.files.items()
        }
        return {"prompt": self.prompt, "precisions": precisions, "left_out": left_out}

    def _precision(self, speed: "Speed", cpus: Mapping[str, Device]) -> dict[str, Any]:
        sizes, precision, prompt = self.sizes, speed.precision, self.prompt
        begins = range(0, prompt, PART)
        prefill = Work(
            sum(sizes.flops(min(PART, prompt - begin), begin) for begin in begins),
            sum(sizes.bytes(precision, begin) for begin in begins),
            len(begins),
        )
        read, step = speed.prompt(prompt), speed.call(1, prompt)
        served, seconds = self.served
        check = {"measured_seconds": seconds, "seconds": step.seconds, "ratio": seconds / step.seconds}
        return {
            "prefill": _part(prefill, prompt, read.products, read.overhead, cpus),
            "decode": _part(Work(sizes.flops(1, prompt), sizes.bytes(precision, prompt)), 1, step.products,
                            step.overhead + speed.reading, cpus),
            "check": check if precision == served else None,
        }  # fmt: skip


def _part(work: Work, tokens: int, products: float, overhead: float, cpus: Mapping[str, Device]) -> dict[str, Any]:
    devices = {}
    for name, device in cpus.items():
        # Quantized weights are converted to floats before the multiplication.
        estimate = roofline(work, device, "fp32", overhead / work.calls)
        assert estimate is not None  # noqa: S101 - every device has floats
        if name == HOST:
            estimate = _probed(estimate, products)
        devices[name] = {**estimate.as_dict(), "tokens_per_second": tokens / estimate.seconds}
    return {**work.as_dict(), "tokens": tokens, "devices": devices}


def _probed(estimate: TimeEstimate, products: float) -> TimeEstimate:
    """Use measured seconds for matrix products, which are memory-bound if reading weights takes half of the time."""
    memory_bound = 2 * estimate.bandwidth >= products
    return replace(estimate, compute=0.0 if memory_bound else products, bandwidth=products if memory_bound else 0.0)
