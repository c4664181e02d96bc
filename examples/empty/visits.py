"""Write made-up visits of the last sixty days to data/visits.csv: `python visits.py`."""

import csv
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

FILE = Path(__file__).parent / "data" / "visits.csv"
DAYS, VISITORS, PAGES = 60, 200, 150
COLUMNS = ("visitor", "began_at", "ended_at", "spent", "page", "saved")
Visit = tuple[str, str, str, float, str, int]
"""The values of `COLUMNS`. A visit ends on `page` and leaves `saved` items on the visitor's list for later."""


def visits(end: datetime, seed: int = 7) -> list[Visit]:
    """Return deterministic visits up to `end`. Saved items make a purchase on the next visit likelier."""
    chance = random.Random(seed)
    appeal = [chance.gauss(3, 1.5) for _ in range(PAGES)]
    rows = []
    for number in range(VISITORS):
        habit, saved, began = chance.random(), 3, end - timedelta(days=DAYS * chance.random())
        while (ended := began + timedelta(minutes=chance.randint(2, 40))) < end:
            bought = chance.random() < 0.05 + 0.15 * min(saved, 6)
            spent = round(chance.gammavariate(2, 15), 2) if bought else 0.0
            page = chance.randrange(PAGES)
            saved = max(0, round(chance.gauss(appeal[page], 0.7)))
            rows.append((f"v{number:03}", began.isoformat(), ended.isoformat(), spent, f"p{page:03}", saved))
            began = ended + timedelta(days=0.1 + 3 * chance.random() * (1.2 - habit))
    return sorted(rows, key=lambda row: row[1])


def write(rows: list[Visit], file: Path) -> None:
    """Write the CSV file that `definitions.py` reads."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    rows = visits(datetime.now(UTC).replace(minute=0, second=0, microsecond=0))
    write(rows, FILE)
    sys.stdout.write(f"{len(rows):,} visits in {FILE}\n")
