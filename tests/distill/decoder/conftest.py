from pathlib import Path

import pytest

from isthmus.distill.export.causal import DecodingReport
from tests.distill.decoder.support import packaged


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> DecodingReport:
    return packaged(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="session")
def package(report: DecodingReport) -> Path:
    return report.path
