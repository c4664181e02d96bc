"""Check value parity from raw files to predictions, and measure the cost of the device model.

Runs `isthmus demo` over a copy of the flights example and compares every value offline, online, on request and in the
package. Then compares the package's student with its teacher, one row at a time.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from result import at_most, less, more, options_parser, report

FLIGHTS = Path(__file__).parents[1] / "examples" / "flights"
P99_US = 100.0


def main() -> int:
    options = options_parser(__doc__, "no effect: the demo has one size").parse_args()
    with TemporaryDirectory(prefix="bench-") as name:
        folder = shutil.copytree(FLIGHTS, Path(name) / "flights", ignore=shutil.ignore_patterns(".*", "data"))
        command = [str(Path(sys.executable).with_name("isthmus")), "demo", "--json", "--project", str(folder)]
        demo = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    verdict, rows, models = demo["verdict"], demo["training_set"], demo["distillation"]["models"]
    student, teacher = models["student"], models["teacher"]
    peer = "the teacher, scikit-learn"
    comparisons = [
        at_most(f"parity of {verdict['compared']:,} values", "differing", verdict["differing"], 0),
        at_most(f"training set of {rows['rows_out']:,} rows", "rows lost", rows["rows_in"] - rows["rows_out"], 0),
        less("device, one row, median", "µs", student["p50_us"], teacher["p50_us"], peer),
        more("device, AUC", "AUC", student["quality"]["auc"], teacher["quality"]["auc"], peer),
        at_most("device, one row, p99", "µs", student["p99_us"], P99_US),
        at_most("the demo", "s", demo["seconds"]["total"], 100),
    ]
    # quick=True: save no result, since docs/performance.md describes the demo itself.
    return report("parity", comparisons, as_json=options.json, quick=True)


if __name__ == "__main__":
    sys.exit(main())
