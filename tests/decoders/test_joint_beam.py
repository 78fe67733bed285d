"""Attention and CTC together: prefix scores, and the joint beam."""

import sys
from itertools import pairwise, product
from math import inf
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_beam
from asrkit.decoders.attention.prefix_scores import PrefixScores
from asrkit.losses import ctc_loss

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import EOS, WIDTH, V, random_frames, random_model, same
from attention_oracle import aed_beam_reference, prefix_score


def ctc_of(B, T, V, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(B, T, V + 1, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


def of(seed, B, T):
    model = random_model(seed, eos=3.0)
    return model, *random_frames(B, T, seed), ctc_of(B, T, V, seed)


def by_ctc_loss(log_probs, labels):
    """Log-probability of a text, by the loss."""
    T = len(log_probs)
    repeats = sum(a == b for a, b in pairwise(labels))
    if len(labels) + repeats > T:
        return -inf
    targets = torch.tensor([labels], dtype=torch.long).view(1, -1)
    lengths = torch.tensor([T]), torch.tensor([len(labels)])
    return -ctc_loss(log_probs[None], targets, *lengths, log_probs.shape[1] - 1).item()


@pytest.mark.parametrize("T", [1, 2, 4])
def test_the_plain_score_of_a_prefix_sums_all_texts_that_begin_with_it(T):
    few = 3
    log_probs = ctc_of(1, T, few, T)[0]
    texts = [text for n in range(T + 1) for text in product(range(few), repeat=n)]
    scores = {text: by_ctc_loss(log_probs, text) for text in texts}
    for text in texts:
        found = prefix_score(log_probs.tolist(), text)
        assert found.text == pytest.approx(scores[text], abs=1e-10)
        longer = [score for each, score in scores.items() if each[: len(text)] == text]
        wanted = torch.tensor(longer, dtype=torch.float64).logsumexp(0).item()
        assert found.prefix == pytest.approx(wanted, abs=1e-10)


def test_the_scores_of_a_beam_are_the_plain_ones_with_anything_in_the_padding():
    B, T, K, few = 3, 6, 4, 3
    lengths = torch.tensor([6, 1, 4])
    log_probs = ctc_of(B, T, few, 5)
    padding = torch.arange(T) >= lengths[:, None]
    poisoned = log_probs.masked_fill(padding[..., None], torch.nan)
    scores = PrefixScores(poisoned, lengths, K, 0.3)
    generator = torch.Generator().manual_seed(0)
    texts = [[[] for _ in range(K)] for _ in range(B)]
    for _ in range(5):
        found = scores.after()
        for b, k in product(range(B), range(K)):
            own = log_probs[b, : lengths[b]].tolist()
            text = texts[b][k]
            wanted = [prefix_score(own, [*text, token]).prefix for token in range(few)]
            wanted.append(prefix_score(own, text).text)
            wanted = torch.tensor(wanted, dtype=torch.float64)
            # one that is impossible counts as one of -10,000 nats here and there
            torch.testing.assert_close(
                found[b, k].clamp(min=-1e3), wanted.clamp(min=-1e3), rtol=0, atol=1e-9
            )
        parents = torch.randint(K, (B, K), generator=generator)
        tokens = torch.randint(few, (B, K), generator=generator)
        moves = torch.rand(B, K, generator=generator) < 0.8
        scores.advance(parents, tokens, moves)
        for b, before in enumerate(texts):
            steps = zip(parents[b], tokens[b].tolist(), moves[b], strict=True)
            texts[b] = [before[n] + [token] * bool(moved) for n, token, moved in steps]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("weight", [0.3, 0.9, 1])
def test_the_joint_search_is_the_plain_one(width, weight):
    for seed in range(6):
        B, T, prompt = [(1, 1, None), (4, 5, [1, 4, 5]), (5, 3, None)][seed % 3]
        model, *batch, ctc = of(seed, B, T)
        for most in (1, 6):
            options = {"width": width, "prompt": prompt, "max_labels": most}
            options |= {"ctc": ctc, "ctc_weight": weight}
            found = aed_beam(model, *batch, **options)
            same(found, aed_beam_reference(model, *batch, **options))
            assert f"beam with CTC ({weight})" in found.impl


def test_a_weight_of_zero_is_attention_alone():
    model, *batch, ctc = of(1, 6, 5)
    alone = aed_beam(model, *batch)
    same(aed_beam(model, *batch, ctc=ctc, ctc_weight=0), alone)


@pytest.mark.parametrize("weight", [0.4, 1])
def test_a_joint_beam_wide_enough_finds_the_best_of_all_texts(weight):
    model, encoded, _, ctc = of(3, 2, 4)
    lengths = torch.tensor([4, 2])
    options = {"width": 230, "max_labels": 2, "ctc": ctc, "ctc_weight": weight}
    found = aed_beam(model, encoded, lengths, **options)
    tokens = sorted(set(range(V)) - {EOS})
    texts = [text for n in range(3) for text in product(tokens, repeat=n)]
    for b in range(2):
        scored = []
        for text in texts:
            with torch.no_grad():
                prefix = torch.tensor([[1, *text]])
                logits = model.logits(encoded[b : b + 1], lengths[b : b + 1], prefix)
            logp = logits[0].log_softmax(-1)
            parts = [logp[u, token].item() for u, token in enumerate([*text, EOS])]
            known = prefix_score(ctc[b, : lengths[b]].tolist(), text)
            score = (1 - weight) * sum(parts) + weight * known.text
            scored.append((score / ((6 + len(text)) / 6), score, list(text)))
            if len(text) == 2:  # or it is cut, with what it has
                cut = (1 - weight) * sum(parts[:2]) + weight * known.prefix
                scored.append((cut / (7 / 6), cut, list(text)))
        _, score, text = max(scored)
        assert found.tokens()[b] == text
        assert found.scores[b].item() == pytest.approx(score, abs=1e-4)


def test_neither_padding_nor_the_rest_of_the_batch_changes_a_joint_score():
    model, encoded, lengths, ctc = of(4, 5, 6)
    wanted = aed_beam(model, encoded, lengths, max_labels=6, ctc=ctc)
    padding = (torch.arange(6) >= lengths[:, None])[..., None]
    poisoned = encoded.masked_fill(padding, torch.nan), lengths
    noise = ctc.masked_fill(padding, torch.nan)
    same(aed_beam(model, *poisoned, max_labels=6, ctc=noise), wanted)
    nobody = torch.zeros(2, 0, WIDTH).double(), torch.tensor([0, 0])
    assert aed_beam(model, *nobody, ctc=torch.zeros(2, 0, V + 1)).tokens() == [[], []]
    for b in range(5):
        own = encoded[b : b + 1], lengths[b : b + 1]
        alone = aed_beam(model, *own, max_labels=6, ctc=ctc[b : b + 1])
        assert alone.tokens()[0] == wanted.tokens()[b]


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_nan_of_ctc_is_not_an_empty_text_that_ended(weight):
    model, encoded, _, ctc = of(0, 3, 6)
    lengths = torch.tensor([6, 4, 5])
    whole = aed_beam(model, encoded, lengths, ctc=ctc, ctc_weight=weight)
    ctc[0, 5, 3] = torch.nan
    ctc[1, 4:] = torch.nan  # padding
    found = aed_beam(model, encoded, lengths, ctc=ctc, ctc_weight=weight)
    assert found.tokens() == [[], *whole.tokens()[1:]]
    assert found.scores[0] == -torch.inf
    assert not found.ended[0]
