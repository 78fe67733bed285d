"""One thread for the small lattices of these tests; tests of threads set more."""

import pytest


@pytest.fixture(autouse=True)
def small_lattices(one_thread):
    """Start every test of this folder on one thread."""
