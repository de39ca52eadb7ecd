import itertools

import pytest

pytest_plugins = ["tests.servers", "tests.faults.matrix.report"]

_numbers = itertools.count(1)


@pytest.fixture
def model() -> str:
    """A model name that no other test uses, with every kind of awkward character."""
    return f"org/test.model v{next(_numbers)}"
