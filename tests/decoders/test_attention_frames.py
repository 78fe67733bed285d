"""Frames of labels by attention: the sequence of largest weight that never goes back."""

import sys
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_beam, aed_greedy, attention_frames
from asrkit.decoders.attention.alignment import frames_of_turns, rising_frames
from asrkit.decoders.attention.loop import GreedyLoop

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import WIDTH, Story, random_model


def draw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("N, T", [(1, 1), (1, 5), (3, 1), (4, 6), (6, 4)])
def test_frames_have_the_largest_sum_of_all_sequences_that_never_go_back(N, T):
    looks = draw(5, N, T)
    found = rising_frames(looks)
    assert (found.diff(dim=1) >= 0).all()
    for row, frames in zip(looks, found, strict=True):
        paths = combinations_with_replacement(range(T), N)
        best = max(sum(float(row[n, t]) for n, t in enumerate(path)) for path in paths)
        taken = float(row.gather(1, frames[:, None]).sum())
        assert taken == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("decode", [aed_greedy, aed_beam])
@pytest.mark.parametrize("seed", [0, 3])
def test_frames_equal_those_of_the_utterance_alone_and_padding_has_none(decode, seed):
    model = random_model(seed)
    lengths = torch.tensor([9, 1, 5, 0])
    encoded = 2 * draw(4, 9, WIDTH) - 1
    prompt = [1, 5, 7]
    found = decode(model, encoded, lengths, prompt=prompt, max_labels=6)
    assert len(found.lengths.unique()) > 1
    encoded[2, 5:] = torch.nan  # padding has no influence
    frames = attention_frames(model, encoded, lengths, found, prompt=prompt)
    assert frames.shape == found.labels.shape
    assert not frames.is_inference()
    for b, labels in enumerate(found.tokens()):
        assert (frames[b, len(labels) :] == -1).all()
        if labels:
            own = encoded[b : b + 1, : lengths[b]], lengths[b : b + 1]
            tokens = torch.tensor([prompt + labels[:-1]])
            with torch.no_grad():
                looks = model.cross_weights(*own, tokens)[:, 2:]
            assert torch.equal(frames[b, : len(labels)], rising_frames(looks)[0])


def test_no_frame_after_the_end_of_an_utterance_is_chosen():
    # looks at any of four frames, however long an utterance is
    story = Story(eos_share=0)
    lengths = torch.tensor([4, 2, 1])
    encoded = 99 * draw(3, 4, 1)
    found = aed_greedy(story, encoded, lengths, max_labels=8)
    frames = attention_frames(story, encoded, lengths, found)
    assert int(found.lengths.min()) == 8
    assert (frames.max(1).values < lengths).all()
    assert int(frames[0].max()) > 0


def test_texts_without_labels_have_no_frames():
    batch = torch.zeros(2, 3, WIDTH), torch.tensor([0, 0])
    found = aed_greedy(Story(), *batch)
    assert attention_frames(Story(), *batch, found).shape == (2, 0)


@pytest.mark.parametrize("seed", [0, 3])
def test_turns_of_greedy_decoding_give_the_frames_of_the_pass(seed):
    model = random_model(seed, eos=3.0)
    B, T = 9, 12
    lengths = torch.tensor([12, 1, 5, 0, 12, 7, 9, 3, 12])
    encoded = 2 * draw(B, T, WIDTH) - 1
    prompts = torch.tensor([[1, 5, 7]]).expand(B, -1)
    with torch.inference_mode():
        memory = model.prefill(encoded, lengths)
        limits = torch.arange(B) + 2  # rows end apart, and leave the batch
        loop = GreedyLoop(
            model,
            memory,
            prompts,
            limits,
            lengths > 0,
            confidence=False,
            attended=True,
        )
        loop.run()
        found = loop.hypotheses("greedy")
        frames = frames_of_turns(model, memory, lengths, found.labels, loop.attended)
    assert len(found.lengths.unique()) > 2
    wanted = attention_frames(model, encoded, lengths, found, prompt=prompts)
    assert torch.equal(frames, wanted)
    assert not frames.is_inference()
