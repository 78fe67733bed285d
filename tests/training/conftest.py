"""What the tests of several heads train on."""

import json

import pytest
import soundfile
import torch


@pytest.fixture
def corpus(tmp_path):
    """A manifest of two utterances of noise."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for name in ("one", "two"):
        noise = 0.1 * torch.randn(16_000, generator=generator)
        soundfile.write(str(tmp_path / f"{name}.wav"), noise.numpy(), 16_000)
        row = {"audio": f"{name}.wav", "text": name, "split": "train", "speaker": name}
        rows.append(row | {"duration": 1.0})
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "m.jsonl")
