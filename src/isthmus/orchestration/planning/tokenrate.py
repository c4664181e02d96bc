"""Tokens per second of a causal language model: of a prompt, and of the tokens that it writes behind it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isthmus.distill.language.causal import Causal
from isthmus.distill.language.decoding import PRECISIONS, Precision
from isthmus.features.errors import extra
from isthmus.orchestration.artifacts import Artifacts, read_json
from isthmus.orchestration.planning.devices import HOST, Device
from isthmus.orchestration.planning.roofline import Estimate, Work, roofline
from isthmus.package.generation.decoder import PART
from isthmus.package.manifest import WHOLE, Manifest

if TYPE_CHECKING:
    from isthmus.distill.decoder.probes import Speed
    from isthmus.distill.decoder.work import Sizes

Probe = Callable[["Sizes", Precision, int, int], "Speed"]
"""Measures this host for a model of some sizes in a precision, with so many threads, by a prompt of so many tokens."""


def probe(sizes: "Sizes", precision: Precision, threads: int, prompt: int) -> "Speed":
    """By `distill.decoding.probes`, in a few seconds."""
    with extra("text"):
        from isthmus.distill.decoder.probes import Probes
    return Probes(sizes, precision, threads, prompt).speed()


@dataclass(frozen=True)
class Text:
    """A model that continues texts, and its package.

    Attributes:
        prompt: tokens of a prompt: half of the context, behind which export measures a step.
        files: of ONNX Runtime, by precision.
        others: files of other runtimes.
        served: the precision of the step that export measured, and its seconds.
    """

    sizes: "Sizes"
    prompt: int
    files: Mapping[Precision, list[str]]
    others: list[str]
    served: tuple[str, float]

    @classmethod
    def of(cls, artifacts: Artifacts, manifest: Manifest, serving: Mapping[str, Any]) -> "Text | None":
        """The student of a package with the measurement of its export; None if it does not continue texts."""
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
        """Tokens per second of each precision on each CPU, as plain data: docs/plan.md describes its parts."""
        left_out = {
            name: "the profile's runtime answers on CPUs" for name, each in devices.items() if each.kind != "cpu"
        }
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
    """Prompt or step on each device: on this host its products take what was measured, elsewhere the roofline's time.

    Weights of few bits become floats before they are multiplied, so that the peak is that of floats.
    """
    devices = {}
    for name, device in cpus.items():
        estimate = roofline(work, device, "fp32", overhead / work.calls)
        assert estimate is not None  # noqa: S101 - every device has floats
        if name == HOST:
            estimate = _probed(estimate, products)
        devices[name] = {**estimate.as_dict(), "tokens_per_second": tokens / estimate.seconds}
    return {**work.as_dict(), "tokens": tokens, "devices": devices}


def _probed(estimate: Estimate, products: float) -> Estimate:
    """This host with the measured seconds of the products: memory limits them if reading the weights explains half."""
    waits = 2 * estimate.bandwidth >= products
    return replace(estimate, compute=0.0 if waits else products, bandwidth=products if waits else 0.0)
