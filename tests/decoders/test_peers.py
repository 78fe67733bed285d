"""NeMo's greedy decoders on the same weights: ours are equal where NeMo's are right."""

import pytest
import torch

from asrkit.decoders import transducer_greedy
from asrkit.models import ConvConfig, LSTMConfig, TransducerConfig, TransducerModel
from benchmarks.peers.peer_decoders import write
from benchmarks.peers.processes import Peers

pytestmark = pytest.mark.live
TDT = [(0, 1, 2, 3, 4), (0, 1, 2, 4, 8)]
SIZES = {
    "encoder": ConvConfig(width=4, layers=1),
    "predictor": LSTMConfig(width=16),
    "joint_width": 16,
    "activation": "relu",
}


@pytest.fixture(scope="module")
def peers():
    """NeMo's loops in their processes, or the reason for their absence."""
    try:
        started = Peers()
    except ValueError as error:
        pytest.skip(str(error))
    with started:
        yield started


@pytest.fixture
def nemo(peers, tmp_path):
    """nemo(loop, model, encoded, lengths, max_symbols): NeMo's answer."""

    def ask(loop, model, encoded, lengths, max_symbols):
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.pt"
        write(path, model, encoded, lengths)
        arms = peers.arms(
            "tdt-greedy-loops",
            plan=str(path),
            max_symbols=max_symbols,
            keep_durations=True,
        )
        if loop not in arms:
            pytest.skip("needs nemo_toolkit: `make peers` installs it")
        answer = arms[loop].request_answer("observe")
        return [torch.tensor(part) for part in answer["digest"]], answer

    return ask


def batch(seed, durations, B=7, T=24):
    """A model of random weights whose blank has an embedding of zero, as NeMo's has; frames, ragged lengths."""
    torch.manual_seed(seed)
    model = TransducerModel(
        TransducerConfig(vocab_size=11, durations=durations, **SIZES)
    ).eval()
    with torch.no_grad():
        model.predictor.embedding.weight[model.blank] = 0
        model.predictor_projection.weight.mul_(6)
        model.output.weight.mul_(6)
        model.output.bias[model.blank] += 2.0 + seed % 3
    return model, 2 * torch.randn(B, T, 16), torch.randint(1, T + 1, (B,))


@pytest.mark.parametrize("durations", [(), *TDT], ids=str)
@pytest.mark.parametrize("max_symbols", [1, 2, 10])
def test_label_looping_equals_nemos(nemo, durations, max_symbols):
    spoken = 0
    for seed in range(6):
        model, encoded, lengths = batch(seed, durations)
        found = transducer_greedy(
            model, encoded, lengths, max_symbols=max_symbols, confidence=True
        )
        (labels, counts, frames), answer = nemo(
            "nemo_label_looping", model, encoded, lengths, max_symbols
        )
        assert labels.tolist() == found.labels.tolist()
        assert counts.tolist() == found.lengths.tolist()
        assert frames.tolist() == found.frames.tolist()
        if not durations:  # its score has the labels only, without blanks, and for TDT it has another softmax
            scores = (
                found.confidence.clamp(min=0)
                .log()
                .masked_fill(found.labels < 0, 0)
                .sum(1)
            )
            torch.testing.assert_close(
                torch.tensor(answer["scores"]), scores, rtol=1e-4, atol=1e-4
            )
        spoken += int(counts.sum())
    assert spoken > 50


@pytest.mark.parametrize("durations", TDT, ids=str)
def test_nemos_durations_depend_on_the_batch_and_ours_do_not(nemo, durations):
    """NeMo 3.0, issue 16097: a label's duration is overwritten while other utterances continue through blanks."""
    model, encoded, lengths = batch(1, durations)
    found = transducer_greedy(model, encoded, lengths)
    together = nemo("nemo_label_looping", model, encoded, lengths, 10)[1]
    wrong = 0
    ours = []
    for b, n in enumerate(lengths):
        alone = transducer_greedy(model, encoded[b : b + 1, :n], lengths[b : b + 1])
        assert (
            found.durations[b, : found.lengths[b]].tolist()
            == alone.durations[0].tolist()
        )
        (labels, _, _), answer = nemo(
            "nemo_label_looping", model, encoded[b : b + 1, :n], lengths[b : b + 1], 10
        )
        assert labels[0].tolist() == alone.labels[0].tolist()
        assert (
            answer["durations"][0] == alone.durations[0].tolist()
        )  # alone it is right
        wrong += together["durations"][b] != answer["durations"][0]
        ours.append(alone.durations[0].tolist())
    assert wrong > 0
    assert together["durations"] != ours


def test_nemos_one_by_one_skips_a_frame_when_the_budget_of_symbols_ends_and_ours_does_not(
    nemo,
):
    """NeMo 3.0, issue 16095: it moves by one frame after `max_symbols` labels even if the last label's duration has moved it."""
    model, encoded, lengths = batch(1, TDT[0])
    found = transducer_greedy(model, encoded, lengths, max_symbols=1)
    wanted = transducer_greedy(
        model, encoded, lengths, max_symbols=1, strategy="one_by_one"
    )
    assert found.tokens() == wanted.tokens()
    assert found.frames.tolist() == wanted.frames.tolist()
    (_, _, batched), _ = nemo("nemo_label_looping", model, encoded, lengths, 1)
    (_, _, alone), _ = nemo("nemo_one_by_one", model, encoded, lengths, 1)
    assert batched.tolist() == found.frames.tolist()
    assert alone.tolist() != batched.tolist()
