"""Dagster's runs in PostgreSQL, by the lines of the documentation and the pinned versions."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import adbc_driver_postgresql.dbapi as postgres
import pytest

from tests.databases import PASSWORD, postgresql
from tests.orchestration.shop import Shop
from tests.repository.pages import blocks


@pytest.mark.accept
def test_a_run_is_kept_in_postgresql(shop: Shop, tmp_path: Path) -> None:
    (block,) = [block for block in blocks("docs/dagster.md", "yaml") if "postgres_url" in block.text]
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(block.text)
    code = tmp_path / "defs.py"
    code.write_text(
        f"from isthmus.orchestration.graph import build_definitions\ndefs = build_definitions({str(shop.root)!r})\n"
    )
    with postgresql(tmp_path / "server") as address:
        url = f"postgresql://shop:{quote(PASSWORD, safe='')}@{address}"
        environment = os.environ | {"DAGSTER_HOME": str(home), "DAGSTER_DATABASE": url}
        command = [sys.executable, "-m", "dagster", "asset", "materialize", "--select", "contract", "-f", str(code)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        with postgres.connect(url) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT status FROM runs")
            assert cursor.fetchall() == [("SUCCESS",)]
    assert (shop.root / ".isthmus" / "contract.json").exists()
    assert not list(home.rglob("*.db"))
