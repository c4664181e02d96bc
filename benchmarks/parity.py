"""From raw files to predictions: whether all values are the same everywhere, and what a device's model costs.

`isthmus demo` over the flights, in a folder of its own: every value offline, online, on request and as the package sees
it. The student of the package beside its teacher, one row at a time.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from result import at_most, less, more, report

FLIGHTS = Path(__file__).parents[1] / "examples" / "flights"
P99_US = 100.0


def main() -> int:
    """Measures, prints, and returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    parser.add_argument("--quick", action="store_true", help="the same: the demo has one size")
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="bench-") as name:
        folder = shutil.copytree(FLIGHTS, Path(name) / "flights", ignore=shutil.ignore_patterns(".*", "data"))
        command = [str(Path(sys.executable).with_name("isthmus")), "demo", "--json", "--project", str(folder)]
        demo = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    verdict, rows, models = demo["verdict"], demo["training_set"], demo["distillation"]["models"]
    student, teacher = models["student"], models["teacher"]
    peer = "the teacher, scikit-learn"
    found = [
        at_most(f"parity of {verdict['compared']:,} values", "differing", verdict["differing"], 0),
        at_most(f"training set of {rows['rows_out']:,} rows", "rows lost", rows["rows_in"] - rows["rows_out"], 0),
        less("device, one row, median", "µs", student["p50_us"], teacher["p50_us"], peer),
        more("device, AUC", "AUC", student["quality"]["auc"], teacher["quality"]["auc"], peer),
        at_most("device, one row, p99", "µs", student["p99_us"], P99_US),
        at_most("the demo", "s", demo["seconds"]["total"], 100),
    ]
    # docs/performance.md says of the demo what this cannot: nothing is kept for it.
    return report("parity", found, as_json=asked.json, quick=True)


if __name__ == "__main__":
    sys.exit(main())
