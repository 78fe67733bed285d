"""Beams of attention decoders, against the plain search, greedy decoding and an exhaustive search."""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_beam, aed_greedy

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import EOS, WIDTH, V, random_frames, random_model, same
from attention_oracle import aed_beam_reference


def of(seed, B, T, **settings):
    return random_model(seed, eos=3.0, **settings), *random_frames(B, T, seed)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("seed", range(9))
def test_the_batched_search_is_the_plain_one(width, seed):
    B, T, prompt = [(1, 1, None), (4, 5, [1, 4, 5]), (5, 3, None)][seed % 3]
    model, *batch = of(seed, B, T)
    for most in (1, 6):
        options = {"width": width, "prompt": prompt, "max_labels": most}
        found = aed_beam(model, *batch, **options)
        same(found, aed_beam_reference(model, *batch, **options))
        assert found.impl.startswith("attention, beam")
        assert not any(part.is_inference() for part in (*found.parts(), found.ended))


@pytest.mark.parametrize(("B", "T"), [(1, 1), (8, 6)])
@pytest.mark.parametrize("most", [1, 9])
def test_a_width_of_one_is_greedy(B, T, most):
    model, *batch = of(B, B, T)
    greedy = aed_greedy(model, *batch, max_labels=most)
    same(aed_beam(model, *batch, width=1, max_labels=most), greedy)


@pytest.mark.parametrize("seed", range(3))
def test_a_beam_wide_enough_finds_the_best_of_all_texts(seed):
    model, encoded, lengths = of(seed, 2, 4)
    lengths = torch.tensor([4, 2])
    spoken = set(range(V)) - {EOS}
    found = aed_beam(model, encoded, lengths, width=230, max_labels=2)
    for b in range(2):
        scored = []
        for n in range(3):
            group = list(product(spoken, repeat=n))
            tokens = torch.tensor([[1, *text] for text in group])
            with torch.no_grad():
                frames = encoded[b : b + 1].expand(len(group), -1, -1)
                heard_ = lengths[b : b + 1].expand(len(group))
                logp = model.logits(frames, heard_, tokens).log_softmax(-1)
            for text, rows in zip(group, logp, strict=True):
                parts = [rows[u, token].item() for u, token in enumerate(text)]
                score = sum(parts) + rows[n, EOS].item()
                scored.append((score / ((5 + n + 1) / 6), score, list(text)))
                if n == 2:  # or it is cut, with what it has
                    cut = sum(parts)
                    scored.append((cut / ((5 + n) / 6), cut, list(text)))
        _, score, text = max(scored)
        assert found.tokens()[b] == text
        assert found.scores[b].item() == pytest.approx(score, abs=1e-4)


def test_neither_padding_nor_the_rest_of_the_batch_changes_a_token():
    model, encoded, lengths = of(4, 5, 6)
    wanted = aed_beam(model, encoded, lengths, max_labels=6)
    padding = torch.arange(6) >= lengths[:, None]
    poisoned = encoded.masked_fill(padding[..., None], torch.nan)
    same(aed_beam(model, poisoned, lengths, max_labels=6), wanted)
    for b in range(5):
        alone = aed_beam(model, encoded[b : b + 1], lengths[b : b + 1], max_labels=6)
        assert alone.tokens()[0] == wanted.tokens()[b]


def test_nan_drops_the_text_and_is_reported_and_no_frames_give_an_empty_text():
    model, encoded, lengths = of(4, 4, 6)
    lengths = torch.tensor([6, 3, 0, 5])
    wanted = aed_beam(model, encoded, lengths, max_labels=6)
    encoded[1, 0] = torch.nan
    found = aed_beam(model, encoded, lengths, max_labels=6)
    assert found.tokens() == [wanted.tokens()[0], [], [], wanted.tokens()[3]]
    assert found.scores[1] == -torch.inf
    assert not found.ended[1]
    assert found.ended[2]
    assert found.scores[2] == 0
    assert "; no end in 1 of 4" in found.impl
    same(found, aed_beam_reference(model, encoded, lengths, max_labels=6))
    nobody = torch.zeros(2, 0, WIDTH).double(), torch.tensor([0, 0])
    assert aed_beam(model, *nobody).tokens() == [[], []]


class Spoiled:
    """A model that gives NaN after some token."""

    def __init__(self, model, token):
        self.model, self.token = model, token

    def __getattr__(self, name):
        return getattr(self.model, name)

    def step(self, tokens, state, memory, *, reach):
        logits, state = self.model.step(tokens, state, memory, reach=reach)
        return logits.masked_fill((tokens == self.token)[..., None], torch.nan), state


@pytest.mark.parametrize("token", [3, 4, 7])
def test_nan_after_one_text_does_not_change_the_others(token):
    model, *batch = of(1, 8, 6)
    spoiled = Spoiled(model, token)
    found = aed_beam(spoiled, *batch, max_labels=6)
    same(found, aed_beam_reference(spoiled, *batch, max_labels=6))
    assert found.tokens() != aed_beam(model, *batch, max_labels=6).tokens()
