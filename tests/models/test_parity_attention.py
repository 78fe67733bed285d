"""The same weights in NeMo's or transformers' own Canary and in ours: features, encoded frames, logits, greedy tokens, prompts.

As in test_parity.py, numbers that these peers computed are compared where `make peers` has not been run (tests/golden).
tests/models/parity_attention_worker.py writes them.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import load_checkpoint
from asrkit.models.attention_decoder import sines
from asrkit.models.prompts import PromptFormat
from asrkit.workbench.bench.peers.processes import PYTHON

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))
import parity_attention_cases as known  # noqa: E402
from canary_files import archive, folder, golden  # noqa: E402
from committed import expect_the_same  # noqa: E402
from parity_cases import LENGTHS, speech  # noqa: E402

CASES = [("nemo", name) for name in known.attention_cases()] + [
    ("transformers", name) for name in known.attention_folders()
]
CLOSE = {"rtol": 0, "atol": 1e-4}
STAGES = ("encoded", "logits")


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """peers(peer, case): our checkpoint of the peer's files, what the peer computes, what we compute. peers.folder_of(peer)."""

    @functools.cache
    def folder_of(peer):
        if not PYTHON.exists():
            pytest.skip(
                "needs .venv-peers: `make peers` installs NeMo and transformers"
            )
        folder = tmp_path_factory.mktemp(peer)
        worker = str(HERE / "parity_attention_worker.py")
        command = [str(PYTHON), "-P", "-W", "ignore", worker, peer, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        return folder

    @functools.cache
    def load(peer, name):
        folder = folder_of(peer)
        theirs = torch.load(folder / f"{name}.pt")
        checkpoint = load_checkpoint(
            folder / (f"{name}.nemo" if peer == "nemo" else name)
        )
        asked = known.ASKED[name]
        return checkpoint, theirs, computed(checkpoint, asked)

    load.folder_of = folder_of
    return load


@torch.no_grad()
def computed(checkpoint, asked):
    """What we compute, stage by stage, each from our own stage before."""
    model = checkpoint.model
    features, frames = log_mel(
        *speech(LENGTHS), config=FeatureConfig(**checkpoint.features)
    )
    encoded, steps, _ = model.encode(features, frames)
    prompt = PromptFormat.from_notes(checkpoint.notes).tokens(**asked)
    given = torch.cat([torch.tensor([prompt] * len(LENGTHS)), known.TEXT], 1)
    logits = model.logits(encoded, steps, given).log_softmax(-1)
    tokens = aed_greedy(model, encoded, steps, prompt=prompt).tokens()
    return {
        "features": features, "frames": frames, "encoded": encoded, "steps": steps, "prompt": prompt, "logits": logits,
        "tokens": tokens,
    }  # fmt: skip


@pytest.mark.parametrize("peer, case", CASES)
def test_each_stage_is_the_peers(peers, peer, case):
    _, theirs, ours = peers(peer, case)
    assert ours["frames"].tolist() == theirs["frames"].tolist()
    assert ours["steps"].tolist() == theirs["steps"].tolist()
    assert 1 in ours["steps"]
    for stage, lengths in (("features", ours["frames"]), ("encoded", ours["steps"])):
        for row, wanted, n in zip(
            ours[stage], theirs[stage], lengths.tolist(), strict=True
        ):
            torch.testing.assert_close(row[:n], wanted[:n], **CLOSE)
    assert ours["prompt"] == theirs["prompt"]
    torch.testing.assert_close(
        ours["logits"], theirs["logits"].log_softmax(-1), **CLOSE
    )
    assert ours["tokens"] == theirs["tokens"]
    assert sum(map(len, ours["tokens"])) > 5


@pytest.mark.parametrize("case", known.attention_cases())
def test_the_text_of_tokens_is_nemos(peers, case):
    checkpoint, theirs, _ = peers("nemo", case)
    assert (
        checkpoint.tokenizer.decode(theirs["tokens_of_text"])
        == theirs["text"].strip()
        != ""
    )


def test_transformers_has_its_sines_first_and_nemo_has_them_interleaved(peers):
    """The trap: with the table of the other the logits are others, and nothing says so."""
    for peer in ("nemo", "transformers"):
        checkpoint, theirs, _ = peers(peer, "canary2")
        model = checkpoint.model
        interleaved = sines(model.most, model.config.width, torch.zeros(()))
        first = torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], 1)
        right, wrong = (interleaved, first) if peer == "nemo" else (first, interleaved)
        torch.testing.assert_close(model.positions, right, **CLOSE)
        before = model.positions.clone()
        model.positions.copy_(wrong)
        logits = computed(checkpoint, known.ASKED["canary2"])["logits"]
        model.positions.copy_(before)
        assert (logits - theirs["logits"].log_softmax(-1)).abs().max() > 0.1


@pytest.mark.parametrize("case", known.attention_goldens())
@pytest.mark.parametrize("peer", ["nemo", "transformers"])
def test_committed_numbers_of_the_peers_are_ours(tmp_path, peer, case):
    theirs = golden(peer)[case]
    made = archive(tmp_path / "a.nemo") if peer == "nemo" else folder(tmp_path / "a")
    ours = computed(load_checkpoint(made), known.ASKED[case])
    for stage in STAGES:
        values = ours[stage]
        if stage == "logits":
            values = values[known.CHOSEN[stage]] - values[known.CHOSEN[stage]].mean(
                -1, keepdim=True
            )
            wanted = torch.tensor(theirs[stage]).view(values.shape)
            wanted = wanted - wanted.mean(
                -1, keepdim=True
            )  # transformers' are no log-probabilities
        else:
            values = values[known.CHOSEN[stage]]
            wanted = torch.tensor(theirs[stage]).view(values.shape)
        torch.testing.assert_close(values, wanted, **CLOSE)
    assert ours["frames"].tolist() == theirs["frames"]
    assert ours["steps"].tolist() == theirs["steps"]
    assert ours["prompt"] == theirs["prompt"]
    assert ours["tokens"] == theirs["tokens"]
    assert any(len(set(row)) > 4 for row in ours["tokens"])


@pytest.mark.parametrize("peer", ["nemo", "transformers"])
def test_a_peer_still_says_what_is_committed(peers, peer):
    said = json.loads((peers.folder_of(peer) / f"{peer}_attention.json").read_text())
    expect_the_same(said, golden(peer), known.CHOSEN, CLOSE)
