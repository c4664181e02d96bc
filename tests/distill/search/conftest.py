import pyarrow as pa
import pytest

from tests.distill.support import training_set


@pytest.fixture(scope="session")
def few() -> pa.Table:
    return training_set(600)
