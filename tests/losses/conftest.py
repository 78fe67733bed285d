"""One thread for the small lattices of these tests; who tests threads asks for more."""

import pytest


@pytest.fixture(autouse=True)
def small_lattices(one_thread):
    """Every test of this folder starts on one thread."""
