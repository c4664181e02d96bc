"""Production quality: the file that `isthmus answers monitor` writes and a server reads."""

import subprocess
import sys

import pytest

from isthmus.features.errors import DataError
from isthmus.features.production import Bound, InputDrift, MeasuredValue, PackageQuality, Production, SliceQuality, Week

AUC = {"auc": MeasuredValue(0.75, 0.7, 0.8)}
NEW = PackageQuality(
    package="b" * 64, precision="int8", first=5, last=9, answers=20, rows=10, measures=AUC,
    weeks=(Week(week="2026-W48", answers=20, rows=10, measures=AUC),),
    slices=(SliceQuality(column="carrier", value=None, answers=3, rows=0, measures={}),),
    drift=(InputDrift(name="score", rows=20, psi=0.1, ks=0.01),), drift_since=5,
)  # fmt: skip
QUALITY = Production(
    model="late", metric="auc", higher_is_better=True, at=10, left_out={"its label is not known yet": 10},
    packages=(
        NEW,
        PackageQuality(package="a" * 64, precision="fp32", first=1, last=4, answers=1, rows=0, measures={}),
    ),
    bounds=(Bound(measure="auc", at_least=0.8, found=AUC["auc"]),),
)  # fmt: skip


def test_what_is_written_is_read() -> None:
    assert Production.loads(QUALITY.dumps()) == QUALITY
    assert QUALITY.of("b" * 64) == NEW == QUALITY.of("b" * 64, "int8")
    assert QUALITY.of("b" * 64, "fp32") is None is QUALITY.of("c" * 64)


def test_no_two_slices_have_a_name_in_common() -> None:
    values = (None, "", "is null", "UA")
    parts = [SliceQuality(column="carrier", value=value, answers=1, rows=0, measures={}) for value in values]
    assert [part.name for part in parts] == ["carrier is null", "carrier: ", "carrier: is null", "carrier: UA"]


@pytest.mark.parametrize("text", [b"", b"{}", b'{"format": 2}', b'{"format": 1}', b"[" * 10_000])
def test_what_is_no_production_quality_says_so(text: bytes) -> None:
    with pytest.raises(DataError, match="isthmus answers monitor"):
        Production.loads(text)


def test_it_is_read_without_arrow_and_numpy() -> None:
    code = "import sys, isthmus.features.production as p; sys.exit(bool({'pyarrow', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
