"""NeMo's and transformers' own Parakeet and Jasper, and ours with the same weights: features, encoded frames, log-probs, tokens.

What they compute is committed (tests/golden); parity_worker.py writes it, and `make test-live` computes it again.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import TransducerModel, load_checkpoint

sys.path.append(str(Path(__file__).resolve().parent))
import parity_cases as known
from published import (
    CLOSE,
    expect_committed,
    featurizer,
    filled_by_peers,
    golden,
    zeros,
)


@torch.no_grad()
def expect_the_numbers(path, theirs):
    """Each stage, computed from the file and our own stage before it, equals the peer's."""
    checkpoint = load_checkpoint(path)
    model = checkpoint.model
    config = FeatureConfig(**checkpoint.features)
    features, frames = log_mel(*known.speech(known.LENGTHS), config=config)
    encoded, steps = model.encoder(features, frames)
    ours = {"features": features, "encoded": encoded}
    lists = {"frames": frames.tolist(), "steps": steps.tolist()}
    if isinstance(model, TransducerModel):
        ours["joint"], _, ours["log_probs"] = model(features, frames, known.TARGETS)
        found = transducer_greedy(model, model.encode(features, frames)[0], steps)
        rows = zip(found.frames.tolist(), found.lengths, strict=True)
        lists["starts"] = [row[:n] for row, n in rows]
        lists["tokens"] = found.tokens()
    else:
        ours["log_probs"], _ = model(features, frames)
    if "ctc_tokens" in theirs:
        lists["ctc_tokens"] = ctc_greedy(ours["log_probs"], steps).tokens()
    assert theirs.keys() <= {"shapes", *ours, *lists}
    for name in theirs.keys() & ours.keys():
        found = known.picked(name, ours[name])
        wanted = torch.tensor(theirs[name])
        torch.testing.assert_close(found, wanted, **CLOSE, msg=name)
    for name in theirs.keys() & lists.keys():
        assert lists[name] == theirs[name], name


@pytest.mark.parametrize("case", known.nemo_cases())
def test_an_archive_computes_what_nemo_committed(tmp_path, case):
    theirs = golden("nemo")[case]
    how = known.nemo_cases()[case]
    config = known.nemo_config(how)
    weights = zeros(theirs["shapes"]) | featurizer(config["preprocessor"])
    weights = known.fill(weights, how.get("blank", 4.0))
    path = known.write_nemo(tmp_path / "model.nemo", config, weights)
    expect_the_numbers(path, theirs)


@pytest.mark.parametrize("case", known.folder_cases())
def test_a_folder_computes_what_transformers_committed(tmp_path, case):
    theirs = golden("transformers")[case]
    how = known.folder_cases()[case]
    weights = known.fill(zeros(theirs["shapes"]), how.get("blank", 4.0))
    config = known.folder_config(how)
    expect_the_numbers(known.write_folder(tmp_path / case, config, weights), theirs)


@pytest.mark.live
@pytest.mark.parametrize("peer", ["nemo", "transformers"])
def test_a_peer_still_gives_the_committed_numbers_and_its_folders_are_read(
    tmp_path, peer
):
    filled_by_peers(tmp_path, "parity_worker.py", peer)
    numbers = json.loads((tmp_path / f"{peer}.json").read_text())
    expect_committed(numbers, golden(peer))
    for case in known.folder_cases() if peer == "transformers" else ():
        expect_the_numbers(tmp_path / case, numbers[case])
