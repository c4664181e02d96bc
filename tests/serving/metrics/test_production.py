"""The gauges of production quality: the worst slices, as long as they are those."""

from pathlib import Path

from isthmus.features.production import MeasuredValue, PackageQuality, Production, SliceQuality, production_file
from isthmus.serving.deployment.record import Approval, Deployment
from isthmus.serving.metrics.gauges import LONGEST, ProductionGauges

DEPLOYED = Deployment(
    model="late", package="/nowhere", digest="a" * 64, contract="c", service="late", precision="fp32", threads=1,
    deployed_at=0, verdict=Approval(0, 1),
)  # fmt: skip


def part(value: str | None, auc: float) -> SliceQuality:
    return SliceQuality(
        column="carrier", value=value, answers=9, rows=5, measures={"auc": MeasuredValue(auc, auc - 0.1, auc + 0.1)}
    )


def shown(gauges: ProductionGauges, state: Path, *slices: SliceQuality) -> dict[tuple[str, str], float]:
    """Name and slice to value, once the file has these slices."""
    package = PackageQuality(
        package="a" * 64, precision="fp32", first=0, last=1, answers=20, rows=10,
        measures={"auc": MeasuredValue(0.7)}, slices=slices,
    )  # fmt: skip
    result = Production(model="late", metric="auc", higher_is_better=True, at=2, left_out={}, packages=(package,))
    file = production_file(state, "late")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(result.dumps())
    gauges.look("late")
    samples = [sample for family in gauges.collect(DEPLOYED) for sample in family.samples]
    found = [sample for sample in samples if "slice" in sample.labels]
    assert len({(sample.name, *sample.labels.items()) for sample in samples}) == len(samples)
    return {(sample.name.removeprefix("isthmus_production_"), sample.labels["slice"]): sample.value for sample in found}


def test_a_slice_is_there_as_long_as_it_is_among_the_worst(tmp_path: Path) -> None:
    gauges = ProductionGauges(tmp_path / "deployment.json")
    assert shown(gauges, tmp_path, part("UA", 0.5), part(None, 0.6)) == {
        (f"slice_{name}", slice_): value
        for slice_, auc in (("carrier: UA", 0.5), ("carrier is null", 0.6))
        for name, value in (
            ("quality", auc), ("quality_low", auc - 0.1), ("quality_high", auc + 0.1), ("answers", 9), ("rows", 5)
        )
    }  # fmt: skip
    assert {name for _, name in shown(gauges, tmp_path, part("DL", 0.4))} == {"carrier: DL"}
    assert shown(gauges, tmp_path) == {}


def test_texts_of_callers_are_shortened_and_never_shown_twice(tmp_path: Path) -> None:
    gauges = ProductionGauges(tmp_path / "deployment.json")
    found = shown(gauges, tmp_path, *(part("x" * LONGEST + end, auc) for end, auc in (("a", 0.5), ("b", 0.6))))
    assert {len(name) for _, name in found} == {LONGEST}
    assert [value for (name, _), value in found.items() if name == "slice_quality"] == [0.5]
