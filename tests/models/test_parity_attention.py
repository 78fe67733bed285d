"""NeMo's and transformers' own Canary, and ours with the same weights: encoded frames, logits, greedy tokens, prompts, texts.

As in test_parity.py, what they compute is committed; parity_attention_worker.py writes it.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import load_checkpoint
from asrkit.models.prompts import PromptFormat

sys.path.append(str(Path(__file__).resolve().parent))
import parity_attention_cases as known
from canary_files import archive, folder
from parity_cases import LENGTHS, speech
from published import CLOSE, expect_committed, filled_by_peers, golden

CASES = [
    *(("nemo", name) for name in known.attention_cases()),
    ("transformers", "canary2"),
]


def from_the_mean(logits):
    """Logits or log-probabilities (..., V), which differ by a number a row."""
    return logits - logits.mean(-1, keepdim=True)


@torch.no_grad()
def expect_the_numbers(path, theirs, arguments):
    """Each stage, computed from the file and our own stage before it, equals the peer's."""
    checkpoint = load_checkpoint(path)
    model = checkpoint.model
    config = FeatureConfig(**checkpoint.features)
    features, frames = log_mel(*speech(LENGTHS), config=config)
    encoded, steps, _ = model.encode(features, frames)
    prompt = PromptFormat.from_notes(checkpoint.notes).tokens(**arguments)
    given = torch.cat([torch.tensor([prompt] * len(LENGTHS)), known.TEXT], 1)
    logits = model.logits(encoded, steps, given)
    for name, values in (("encoded", encoded), ("logits", logits)):
        found = values[known.CHOSEN[name]]
        wanted = torch.tensor(theirs[name]).view(found.shape)
        if name == "logits":
            found, wanted = from_the_mean(found), from_the_mean(wanted)
        torch.testing.assert_close(found, wanted, **CLOSE, msg=name)
    assert frames.tolist() == theirs["frames"]
    assert steps.tolist() == theirs["steps"]
    assert prompt == theirs["prompt"]
    tokens = aed_greedy(model, encoded, steps, prompt=prompt).tokens()
    assert tokens == theirs["tokens"]
    if "text" in theirs:
        text, wanted = theirs["text"]
        assert checkpoint.tokenizer.decode(text) == wanted.strip()


@pytest.mark.parametrize("peer, case", CASES)
def test_the_committed_numbers_of_the_peers_are_ours(tmp_path, peer, case):
    write = {"nemo": lambda path: archive(path, name=case), "transformers": folder}
    theirs = golden(f"{peer}_attention")[case]
    expect_the_numbers(
        write[peer](tmp_path / "a.nemo"),
        theirs,
        known.ARGUMENTS[case.removesuffix("-bpe")],
    )


@pytest.mark.live
@pytest.mark.parametrize("peer", ["nemo", "transformers"])
def test_a_peer_still_gives_the_committed_numbers_and_its_folder_is_read(
    tmp_path, peer
):
    filled_by_peers(tmp_path, "parity_attention_worker.py", peer)
    numbers = json.loads((tmp_path / f"{peer}_attention.json").read_text())
    expect_committed(numbers, golden(f"{peer}_attention"))
    if peer == "transformers":
        theirs = numbers["canary2"]
        expect_the_numbers(tmp_path / "canary2", theirs, known.ARGUMENTS["canary2"])
