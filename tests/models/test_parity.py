"""The same weights in NeMo's or transformers' own model and in ours: features, encoded frames, log-probs, tokens, one by one.

Where `make peers` has not been run, numbers that these peers computed are compared (tests/golden); where it has, those are computed
again too. tests/models/parity_worker.py writes them.
"""

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.features import FeatureConfig, log_mel, mel_bands
from asrkit.models import TransducerModel, load_checkpoint
from asrkit.workbench.bench.peers.processes import PYTHON

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
sys.path.append(str(HERE))
from committed import expect_the_same  # noqa: E402

spec = importlib.util.spec_from_file_location("parity_cases", HERE / "parity_cases.py")
known = importlib.util.module_from_spec(spec)
spec.loader.exec_module(known)

CASES = [("nemo", name) for name in known.nemo_cases()] + [
    ("transformers", name) for name in known.cases()
]
CTC = [(peer, name) for peer, name in CASES if name.startswith(("ctc", "hybrid"))]
TRANSDUCERS = [(peer, name) for peer, name in CASES if not name.startswith("ctc")]
CLOSE = {"rtol": 0, "atol": 1e-4}


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
        command = [
            str(PYTHON),
            "-P",
            "-W",
            "ignore",
            str(HERE / "parity_worker.py"),
            peer,
            str(folder),
        ]
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
        return (
            checkpoint,
            theirs,
            computed(checkpoint, theirs["waveforms"], theirs["lengths"]),
        )

    load.folder_of = folder_of
    return load


@torch.no_grad()
def computed(checkpoint, waveforms, lengths):
    """What we compute, stage by stage, each from our own stage before."""
    model = checkpoint.model
    features, frames = log_mel(
        waveforms, lengths, config=FeatureConfig(**checkpoint.features)
    )
    encoded, steps = model.encoder(features, frames)
    ours = {"features": features, "frames": frames, "encoded": encoded, "steps": steps}
    if isinstance(model, TransducerModel):
        ours["joint"], _, ours["log_probs"] = model(features, frames, known.TARGETS)
        found = transducer_greedy(model, model.encode(features, frames)[0], steps)
        starts = [
            row[:n].tolist() for row, n in zip(found.frames, found.lengths, strict=True)
        ]
        ours |= {"tokens": found.tokens(), "starts": starts}
    else:
        ours["log_probs"], _ = model(features, frames)
    if ours["log_probs"].shape[-1]:
        ours["ctc_tokens"] = ctc_greedy(ours["log_probs"], steps).tokens()
    return ours


def assert_close(ours, theirs, lengths):
    """Both (B, T, ...) within each utterance; what lies behind it is nobody's business."""
    for row, wanted, n in zip(ours, theirs, lengths.tolist(), strict=True):
        torch.testing.assert_close(row[:n], wanted[:n], **CLOSE)


@pytest.mark.parametrize("peer, case", CASES)
def test_features_and_encoded_frames_are_the_peers(peers, peer, case):
    _, theirs, ours = peers(peer, case)
    assert ours["frames"].tolist() == theirs["frames"].tolist()
    assert_close(ours["features"], theirs["features"], ours["frames"])
    assert ours["steps"].tolist() == theirs["steps"].tolist()
    assert 1 in ours["steps"]
    assert_close(ours["encoded"], theirs["encoded"], ours["steps"])


@pytest.mark.parametrize("peer, case", CTC)
def test_ctc_log_probs_and_tokens_are_the_peers(peers, peer, case):
    _, theirs, ours = peers(peer, case)
    assert_close(ours["log_probs"], theirs["log_probs"], ours["steps"])
    assert ours["ctc_tokens"] == theirs["ctc_tokens"]
    assert sum(map(len, ours["ctc_tokens"])) > 5


@pytest.mark.parametrize("peer, case", TRANSDUCERS)
def test_joint_and_tokens_and_their_frames_are_the_peers(peers, peer, case):
    checkpoint, theirs, ours = peers(peer, case)
    V = checkpoint.model.blank + 1
    assert (
        ours["joint"].shape[-1]
        == theirs["joint"].shape[-1]
        == V + len(checkpoint.model.durations)
    )
    for part in (slice(V), slice(V, None)):  # labels and durations have a softmax each
        assert_close(
            ours["joint"][..., part].log_softmax(-1),
            theirs["joint"][..., part].log_softmax(-1),
            ours["steps"],
        )
    assert ours["tokens"] == theirs["tokens"]
    assert ours["starts"] == theirs["starts"]
    assert sum(map(len, ours["tokens"])) > 5


def test_generate_of_transformers_takes_a_durations_place_for_its_frames_and_ours_does_not(
    peers,
):
    """transformers 5.23: its reference loop, with durations as configured, is ours; its `generate` is so for 0, 1, 2, 3, 4 only."""
    _, theirs, ours = peers("transformers", "tdt")
    assert theirs["generated"] == ours["tokens"]
    checkpoint, theirs, ours = peers("transformers", "tdt-leaps")
    assert checkpoint.model.durations == (0, 1, 2, 4, 8)
    assert theirs["tokens"] == ours["tokens"] != theirs["generated"]


def test_generate_of_transformers_labels_the_padding_of_shorter_utterances_and_ours_does_not(
    peers,
):
    """transformers 5.23: nothing stops an utterance whose frames have ended before those of the longest in its batch."""
    _, theirs, ours = peers("transformers", "rnnt")
    assert theirs["generated_behind"][0] == 0 < theirs["generated_behind"][2]
    for starts, steps in zip(ours["starts"], ours["steps"].tolist(), strict=True):
        assert max(starts, default=0) < steps


@pytest.mark.parametrize("peer, case", [("nemo", "tdt"), ("transformers", "tdt")])
def test_an_utterance_alone_is_what_it_is_beside_longer_ones(peers, peer, case):
    checkpoint, theirs, ours = peers(peer, case)
    n = int(theirs["lengths"][2])
    alone = computed(
        checkpoint, theirs["waveforms"][2:3, :n].repeat(4, 1), torch.full((4,), n)
    )
    steps = int(ours["steps"][2])
    torch.testing.assert_close(
        alone["encoded"][2, :steps], theirs["encoded"][2, :steps], **CLOSE
    )
    assert alone["tokens"][2] == theirs["tokens"][2]


def golden(peer):
    """The committed numbers of a peer."""
    return json.loads((GOLDEN / f"{peer}.json").read_text())


@pytest.mark.parametrize("case", known.golden_cases())
@pytest.mark.parametrize("peer", ["nemo", "transformers"])
def test_committed_numbers_of_the_peers_are_ours(tmp_path, peer, case):
    theirs, how = golden(peer)[case], known.golden_cases()[case]
    states = {name: torch.zeros(shape) for name, shape in theirs["shapes"].items()}
    if peer == "nemo":
        window, bands = (
            torch.hann_window(400, periodic=False),
            mel_bands(FeatureConfig()).T[None],
        )
        states |= {
            "preprocessor.featurizer.window": window,
            "preprocessor.featurizer.fb": bands,
        }
        known.write_nemo(
            path := tmp_path / "model.nemo", known.nemo_config(how), known.fill(states)
        )
    else:
        known.write_folder(
            path := tmp_path / "model", known.folder_config(how), known.fill(states)
        )
    ours = computed(load_checkpoint(path), *known.speech(known.LENGTHS))
    for stage in theirs.keys() & known.PLACES.keys():
        torch.testing.assert_close(
            known.picked(stage, ours[stage]), torch.tensor(theirs[stage]), **CLOSE
        )
    for name in theirs.keys() & {"frames", "steps", "tokens", "starts", "ctc_tokens"}:
        assert (
            ours[name].tolist() if torch.is_tensor(ours[name]) else ours[name]
        ) == theirs[name], name


@pytest.mark.parametrize("peer", ["nemo", "transformers"])
def test_a_peer_still_says_what_is_committed(peers, peer):
    said = json.loads((peers.folder_of(peer) / f"{peer}.json").read_text())
    expect_the_same(said, golden(peer), known.PLACES, CLOSE)
