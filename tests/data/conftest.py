"""Small synthetic corpora, and a home of their own for each test."""

import pytest
import torch

from asrkit.data import Utterances


@pytest.fixture(autouse=True)
def small_tensors(one_thread):
    """Every test of this folder runs on one thread."""


@pytest.fixture
def a_home(tmp_path, monkeypatch):
    """An empty $ASRKIT_HOME."""
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def utterances():
    """A hundred utterances of 0.05 to 5 s, each sample equal to the utterance's number + 1."""
    samples = torch.randint(800, 80_000, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    return Utterances(
        waveforms=[torch.full((size,), n + 1, dtype=torch.int16) for n, size in enumerate(samples)],
        ids=[f"u{n}" for n in range(100)],
        texts=["a" * (n % 7) for n in range(100)],
        speakers=["s"] * 100,
    )
