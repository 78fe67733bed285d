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
from attention_cases import EOS, WIDTH, V, heard, random_model, same
from attention_oracle import aed_beam_reference, prefix_score


def ctc_of(B, T, V, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(B, T, V + 1, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


def of(seed, B, T, **settings):
    model = random_model(seed, eos=3.0, **settings)
    return model, *heard(B, T, seed, least=0), ctc_of(B, T, V, seed)


def by_ctc_loss(log_probs, labels):
    """Log-probability of a text, by the loss."""
    T = len(log_probs)
    targets = torch.tensor([labels], dtype=torch.long).view(1, -1)
    lengths = torch.tensor([T]), torch.tensor([len(labels)])
    repeats = sum(a == b for a, b in pairwise(labels))
    if len(labels) + repeats > T:
        return -inf
    return -ctc_loss(log_probs[None], targets, *lengths, log_probs.shape[1] - 1).item()


@pytest.mark.parametrize("T", [1, 2, 4])
def test_the_plain_score_of_a_prefix_sums_all_texts_that_begin_with_it(T):
    few = 3
    log_probs = ctc_of(1, T, few, T)[0]
    texts = [text for n in range(T + 1) for text in product(range(few), repeat=n)]
    scores = {text: by_ctc_loss(log_probs, text) for text in texts}
    total = torch.tensor(list(scores.values()), dtype=torch.float64).logsumexp(0)
    assert total.item() == pytest.approx(0, abs=1e-12)
    for text in texts:
        found = prefix_score(log_probs.tolist(), text)
        assert found.text == pytest.approx(scores[text], abs=1e-10)
        begun = [
            score for longer, score in scores.items() if longer[: len(text)] == text
        ]
        wanted = torch.tensor(begun, dtype=torch.float64).logsumexp(0).item()
        assert found.prefix == pytest.approx(wanted, abs=1e-10)


def test_the_scores_of_a_beam_are_the_plain_ones_whatever_lies_behind_the_frames():
    B, T, K, few = 3, 6, 4, 3
    lengths = torch.tensor([6, 1, 4])
    log_probs = ctc_of(B, T, few, 5)
    poisoned = log_probs.clone()
    for b in range(B):
        poisoned[b, lengths[b] :] = torch.nan
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
        before = [[texts[b][parents[b, k]] for k in range(K)] for b in range(B)]
        scores.advance(parents, tokens, moves)
        texts = [
            [
                text + [int(tokens[b, k])] * bool(moves[b, k])
                for k, text in enumerate(row)
            ]
            for b, row in enumerate(before)
        ]
    assert any(a == b for row in texts for text in row for a, b in pairwise(text))


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("weight", [0.3, 0.5, 0.9])
def test_the_joint_search_is_the_plain_one(width, weight):
    found_lengths = set()
    for seed in range(6):
        B, T, prompt = [(1, 1, None), (4, 5, [1, 4, 5]), (5, 3, None)][seed % 3]
        model, encoded, lengths, ctc = of(seed, B, T)
        for most in (1, 6):
            options = {"width": width, "prompt": prompt, "most": most}
            options |= {"ctc": ctc, "ctc_weight": weight}
            found = aed_beam(model, encoded, lengths, **options)
            same(found, aed_beam_reference(model, encoded, lengths, **options))
            assert f"beam with CTC ({weight})" in found.impl
            found_lengths |= {len(row) for row in found.tokens()}
    assert len(found_lengths) > 2


def test_a_weight_of_zero_is_attention_alone_and_of_one_ctc_alone():
    model, encoded, lengths, ctc = of(1, 6, 5)
    options = {"width": 4, "most": 6}
    alone = aed_beam(model, encoded, lengths, **options)
    same(aed_beam(model, encoded, lengths, ctc=ctc, ctc_weight=0, **options), alone)
    found = aed_beam(
        model, encoded, lengths, ctc=ctc, ctc_weight=1, **options | {"width": 200}
    )
    for b, length in enumerate(lengths.tolist()):
        own = ctc[b, :length].tolist()
        row = found.tokens()[b]
        assert found.ended[b]
        assert found.scores[b].item() == pytest.approx(
            prefix_score(own, row).text, abs=1e-4
        )
        value = found.scores[b].item() / ((6 + len(row)) / 6)
        for text in product(sorted(set(range(V)) - {EOS}), repeat=2):
            assert prefix_score(own, text).text / (8 / 6) <= value + 1e-4


def test_a_joint_beam_wide_enough_finds_the_best_of_all_texts():
    model, encoded, lengths, ctc = of(3, 2, 4)
    lengths = torch.tensor([4, 2])
    options = {"width": 230, "most": 2, "ctc": ctc, "ctc_weight": 0.4}
    found = aed_beam(model, encoded, lengths, **options)
    texts = [
        text
        for n in range(3)
        for text in product(sorted(set(range(V)) - {EOS}), repeat=n)
    ]
    for b in range(2):
        scored = []
        for text in texts:
            with torch.no_grad():
                tokens = torch.tensor([[1, *text]])
                logits = model.logits(encoded[b : b + 1], lengths[b : b + 1], tokens)
            logp = logits[0].log_softmax(-1)
            parts = [logp[u, token].item() for u, token in enumerate([*text, EOS])]
            known = prefix_score(ctc[b, : lengths[b]].tolist(), text)
            score = 0.6 * sum(parts) + 0.4 * known.text
            scored.append((score / ((6 + len(text)) / 6), score, list(text)))
            if len(text) == 2:  # or it is cut, with what it has
                cut = 0.6 * sum(parts[:2]) + 0.4 * known.prefix
                scored.append((cut / (7 / 6), cut, list(text)))
        _, score, text = max(scored)
        assert found.tokens()[b] == text
        assert found.scores[b].item() == pytest.approx(score, abs=1e-4)


def test_neither_padding_nor_the_rest_of_the_batch_changes_a_joint_score():
    model, encoded, lengths, ctc = of(4, 5, 6)
    wanted = aed_beam(model, encoded, lengths, most=6, ctc=ctc)
    behind = (torch.arange(6) >= lengths[:, None])[..., None]
    found = aed_beam(
        model,
        encoded.masked_fill(behind, torch.nan),
        lengths,
        most=6,
        ctc=ctc.masked_fill(behind, torch.nan),
    )
    same(found, wanted)
    nobody = torch.zeros(2, 0, WIDTH).double(), torch.tensor([0, 0])
    assert aed_beam(model, *nobody, ctc=torch.zeros(2, 0, V + 1)).tokens() == [[], []]
    for b in range(5):
        own = encoded[b : b + 1], lengths[b : b + 1]
        alone = aed_beam(model, *own, most=6, ctc=ctc[b : b + 1])
        assert alone.tokens()[0] == wanted.tokens()[b]
