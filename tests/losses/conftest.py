"""One thread for the small lattices of these tests; who tests threads asks for more."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that meet on a busy machine wait longer than a small case takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
