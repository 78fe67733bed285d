"""Frames of labels by attention: those that never go back and are looked at most."""

import sys
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_beam, aed_greedy, attention_frames
from asrkit.decoders.attention.alignment import rising_frames
from asrkit.models import AEDConfig, AEDModel, ConvConfig

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import Story


@pytest.fixture(autouse=True)
def small_batches(one_thread):
    """Every test of this file starts on one thread."""


@pytest.mark.parametrize("N, T", [(1, 1), (1, 5), (3, 1), (4, 6), (6, 4)])
def test_they_are_the_best_of_all_that_never_go_back(N, T):
    looks = torch.rand(
        5, N, T, generator=torch.Generator().manual_seed(N + T), dtype=torch.float64
    )
    found = rising_frames(looks)
    assert (found.diff(dim=1) >= 0).all()
    for row, frames in zip(looks, found, strict=True):
        paths = combinations_with_replacement(range(T), N)
        best = max(sum(float(row[n, t]) for n, t in enumerate(path)) for path in paths)
        assert float(row.gather(1, frames[:, None]).sum()) == pytest.approx(
            best, abs=1e-12
        )


def model():
    torch.manual_seed(0)
    sizes = {
        "encoder": ConvConfig(bins=4, width=6, layers=1),
        "width": 8,
        "heads": 2,
        "layers": 2,
    }
    made = (
        AEDModel(AEDConfig(vocab_size=11, pad=0, bos=1, eos=2, most=20, **sizes))
        .double()
        .eval()
    )
    for weight in made.parameters():
        weight.data += 0.5 * torch.randn_like(weight)
    return made


@pytest.mark.parametrize("decode", [aed_greedy, aed_beam])
def test_each_label_has_one_within_its_utterance_and_padding_none(decode):
    attending = model()
    lengths = torch.tensor([9, 1, 5, 0])
    encoded = torch.randn(4, 9, 8, dtype=torch.float64)
    prompt = [1, 5, 7]
    found = decode(attending, encoded, lengths, prompt=prompt, most=6)
    assert len(found.lengths.unique()) > 1
    frames = attention_frames(attending, encoded, lengths, found, prompt=prompt)
    assert frames.shape == found.labels.shape
    assert not frames.is_inference()
    for row, count, T in zip(
        frames, found.lengths.tolist(), lengths.tolist(), strict=True
    ):
        assert (row[count:] == -1).all()
        assert ((row[:count] >= 0) & (row[:count] < max(T, 1))).all()
        assert (row[:count].diff() >= 0).all()
    noise = encoded.clone()
    noise[2, 5:] = torch.nan  # what lies behind an utterance has no say
    assert torch.equal(
        attention_frames(attending, noise, lengths, found, prompt=prompt), frames
    )


def test_where_single_frames_never_go_back_it_takes_those():
    attending = model()
    compared = 0
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        encoded = torch.randn(1, 4, 8, generator=generator, dtype=torch.float64)
        lengths = torch.tensor([4])
        found = aed_greedy(attending, encoded, lengths, most=3)
        with torch.no_grad():
            tokens = torch.tensor([[attending.bos, *found.tokens()[0]]])
            own = attending.looks(encoded, lengths, tokens[:, :-1]).argmax(-1)
        if found.labels.shape[1] > 1 and (own.diff() >= 0).all():
            compared += 1
            assert torch.equal(
                attention_frames(attending, encoded, lengths, found), own
            )
    assert compared > 2


def test_no_frame_behind_an_utterance_is_taken_whatever_a_model_looks_at():
    story = Story(
        eos_share=0
    )  # looks at any of four frames, however long an utterance is
    lengths = torch.tensor([4, 2, 1])
    encoded = torch.randint(
        0, 99, (3, 4, 1), generator=torch.Generator().manual_seed(0)
    ).double()
    found = aed_greedy(story, encoded, lengths, most=8)
    frames = attention_frames(story, encoded, lengths, found)
    assert int(found.lengths.min()) == 8
    assert (frames.max(1).values < lengths).all()
    assert int(frames[0].max()) > 0


def test_texts_without_labels_have_no_frames():
    attending = model()
    lengths = torch.tensor([0, 0])
    encoded = torch.randn(2, 3, 8, dtype=torch.float64)
    found = aed_greedy(attending, encoded, lengths)
    assert attention_frames(attending, encoded, lengths, found).shape == (2, 0)


def test_hypotheses_of_another_batch_are_refused():
    attending = model()
    encoded = torch.randn(2, 3, 8, dtype=torch.float64)
    found = aed_greedy(attending, encoded[:1], torch.tensor([3]))
    with pytest.raises(ValueError, match="hypotheses: expected shape"):
        attention_frames(attending, encoded, torch.tensor([3, 3]), found)
