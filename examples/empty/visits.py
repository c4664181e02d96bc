"""Writes made-up visits of the last sixty days: data/visits.csv. `python visits.py`."""

import csv
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

FILE = Path(__file__).parent / "data" / "visits.csv"
DAYS, VISITORS = 60, 200


def visits(end: datetime) -> list[tuple[str, str, str, float]]:
    """Visitor, beginning, end and money spent of each visit: the same for the same end."""
    chance = random.Random(7)
    rows = []
    for number in range(VISITORS):
        habit, began = chance.random(), end - timedelta(days=DAYS * chance.random())
        while (ended := began + timedelta(minutes=chance.randint(2, 40))) < end:
            bought = chance.random() < 0.05 + 0.9 * habit
            spent = round(chance.gammavariate(2, 15), 2) if bought else 0.0
            rows.append((f"v{number:03}", began.isoformat(), ended.isoformat(), spent))
            habit = 0.9 * habit + 0.1 * bought
            began = ended + timedelta(days=0.1 + 3 * chance.random() * (1.2 - habit))
    return sorted(rows, key=lambda row: row[1])


def write(rows: list[tuple[str, str, str, float]], file: Path) -> None:
    """A CSV file that `definitions.py` reads."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([("visitor", "began_at", "ended_at", "spent"), *rows])


if __name__ == "__main__":
    made = visits(datetime.now(UTC).replace(minute=0, second=0, microsecond=0))
    write(made, FILE)
    sys.stdout.write(f"{len(made):,} visits in {FILE}\n")
