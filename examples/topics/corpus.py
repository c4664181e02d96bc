"""Write the descriptions of Debian's packages to data/articles.parquet: `python corpus.py [LABELS]`.

Fetches the package lists of Debian 12 into data/lists with `apt-get`, without root and without changing the system. A
description has the license of its package; this repository contains none of them.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.tasks import split_by_value

FOLDER = Path(__file__).parent / "data"
FILE = FOLDER / "articles.parquet"
SPLIT = (0.76, 0.04, 0.2)
LABELS = 1000
"""Training texts that keep their label; the teacher alone answers the others."""
TOPICS = {
    "admin": "admin", "database": "database", "editors": "editors", "electronics": "electronics", "fonts": "fonts",
    "games": "games", "graphics": "graphics", "httpd": "web", "mail": "mail", "math": "math", "net": "net",
    "science": "science", "sound": "sound", "text": "text", "video": "video", "web": "web",
}  # fmt: skip
"""Debian's sections with a clear subject, and their topic."""
SUITE = (
    "Types: deb\nURIs: http://deb.debian.org/debian\nSuites: bookworm\nComponents: main\n"
    "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
)


class Article(NamedTuple):
    """A package, its source package, its description and its topic."""

    name: str
    source: str
    text: str
    topic: str


def articles(packages: str, descriptions: str) -> Iterator[Article]:
    """Yield the packages with a topic, from the content of a Packages and a Translation-en list."""
    texts = {}
    for paragraph in descriptions.split("\n\n"):
        name = re.search(r"^Package: (.+)$", paragraph, re.MULTILINE)
        text = re.search(r"^Description-en: (.+(?:\n .*)*)", paragraph, re.MULTILINE)
        if name and text:
            texts[name[1]] = " ".join(re.sub(r"^ \.$", "", text[1], flags=re.MULTILINE).split())
    for paragraph in packages.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Source|Section): (\S+)", paragraph, re.MULTILINE))
        topic, name = TOPICS.get(fields.get("Section", "")), fields.get("Package", "")
        if topic and name in texts:
            yield Article(name, fields.get("Source", name), texts[name], topic)


def corpus(found: list[Article], labels: int = LABELS) -> pa.Table:
    """Return the articles by name, each text once, where only `labels` texts of the training part have a topic.

    Packages of the same source have similar texts, so they stay in one part.
    """
    each = {article.text: article for article in sorted(found, reverse=True)}
    table = pa.Table.from_pylist([article._asdict() for article in sorted(each.values())])
    train = split_by_value(table["source"], SPLIT).train
    hidden = np.zeros(table.num_rows, bool)
    hidden[np.random.default_rng(0).permutation(train)[labels:]] = True
    topics = pa.array(table["topic"].to_pylist(), pa.string(), mask=hidden)
    return table.set_column(table.column_names.index("topic"), "topic", topics)


def fetched() -> list[Article]:
    """Return the articles of Debian 12, after fetching its lists."""
    lists = FOLDER / "lists"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    suite = FOLDER / "debian.sources"
    suite.write_text(SUITE)
    options = {
        "Acquire::Languages": "en", "Dir::State::lists": lists, "Dir::Etc::sourcelist": suite,
        "Dir::Etc::sourceparts": "-", "Dir::Cache": FOLDER, "APT::Sandbox::User": "root",
    }  # fmt: skip
    command = ["/usr/bin/apt-get", *(f"-o{key}={value}" for key, value in options.items()), "update"]
    subprocess.run(command, check=True)  # noqa: S603 - a fixed command
    packages, descriptions = (next(lists.glob(f"*bookworm_main_{kind}*")) for kind in ("binary-", "i18n_"))
    return [*articles(_read(packages), _read(descriptions))]


def _read(file: Path) -> str:
    command = ["/usr/lib/apt/apt-helper", "cat-file", str(file)]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout  # noqa: S603 - a fixed command


if __name__ == "__main__":
    table = corpus(fetched(), *map(int, sys.argv[1:2]))
    pq.write_table(table, FILE)
    hidden = table["topic"].null_count
    sys.stdout.write(f"{table.num_rows:,} texts in {FILE}; {hidden:,} of them have no label\n")
