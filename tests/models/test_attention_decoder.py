"""The attention decoder computes the same in steps, with a cache, as for a whole text."""

from itertools import product

import pytest
import torch

from asrkit.decoders.states import map_state, state_tensors
from asrkit.models import (
    AEDConfig,
    AEDModel,
    ConvConfig,
    optimize,
)


@pytest.fixture(autouse=True)
def small_batches(one_thread):
    """Every test of this file starts on one thread."""


def small(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    special = {"vocab_size": 11, "pad": 0, "bos": 1, "eos": 2}
    sizes = {"width": 8, "heads": 2, "layers": 2, "most": 16}
    encoder = ConvConfig(bins=4, width=6, layers=1)
    model = AEDModel(AEDConfig(**special, **sizes, encoder=encoder, **settings))
    for layer in model.layers:  # biases start small, and those of keys must cancel
        torch.nn.init.normal_(layer.cross_attention.key_value.bias)
        torch.nn.init.normal_(layer.self_attention.qkv.bias)
    torch.nn.init.normal_(model.output_bias)
    return model.to(dtype).eval()


def spoken(B, T, U, dtype=torch.float64):
    generator = torch.Generator().manual_seed(B + T + U)
    encoded = torch.randn(B, T, 8, generator=generator, dtype=torch.float64).to(dtype)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    tokens = torch.randint(0, 11, (B, U), generator=generator)
    return encoded, lengths, tokens


def by_steps(model, encoded, lengths, tokens, *, chunks, room=16, bounded=True):
    """Logits of `tokens`, as many at a time as `chunks` say."""
    memory = model.prefill(encoded, lengths)
    state = model.init_state(memory, room)
    parts = []
    seen = 0
    for chunk in chunks:
        more = tokens[:, seen : seen + chunk]
        seen += chunk
        logits, state = model.step(more, state, memory, reach=seen if bounded else None)
        parts.append(logits)
    return torch.cat(parts, 1)


# ---- values


@pytest.mark.parametrize("padding", [-1, -100])
def test_tokens_may_be_padded_with_negative_numbers(padding):
    model = small()
    encoded, lengths, tokens = spoken(2, 5, 6)
    padded = tokens.clone()
    padded[1, 4:] = padding
    found, wanted = (model.logits(encoded, lengths, one) for one in (padded, tokens))
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1, :4], wanted[1, :4])
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-5)]
)
@torch.no_grad()
def test_steps_compute_the_same_as_a_whole_text(dtype, most):
    model = small(dtype)
    for B, T, U in (1, 1, 1), (3, 7, 5), (33, 4, 2):
        text = spoken(B, T, U, dtype)
        wanted = model.logits(*text)
        for chunks, bounded in product(([1] * U, [U]), (True, False)):
            found = by_steps(model, *text, chunks=chunks, bounded=bounded)
            torch.testing.assert_close(found, wanted, rtol=0, atol=most)


def test_the_reference_of_all_is_written_out():
    model = small()
    encoded, _, tokens = spoken(1, 5, 4)
    D, H = 8, 2
    with torch.no_grad():
        angle = [[u / 10_000 ** (2 * i / D) for i in range(D // 2)] for u in range(4)]
        angle = torch.tensor(angle, dtype=torch.float64)
        sines = torch.stack([angle.sin(), angle.cos()], -1).flatten(1) / D**0.5
        x = model.embedding_norm(model.embedding.weight[tokens[0]] + sines)
        for layer in model.layers:
            normed = layer.self_norm(x)
            q, k, v = layer.self_attention.qkv(normed).chunk(3, -1)
            x = x + layer.self_attention.out(mixed(q, k, v, H, causal=True))
            q = layer.cross_attention.query(layer.cross_norm(x))
            k, v = layer.cross_attention.key_value(encoded[0]).chunk(2, -1)
            x = x + layer.cross_attention.out(mixed(q, k, v, H, causal=False))
            x = x + layer.feed_forward(layer.feed_forward_norm(x))
        wanted = model.norm(x) @ model.embedding.weight.T + model.output_bias
        found = model.logits(encoded, torch.tensor([5]), tokens)
    torch.testing.assert_close(
        found[0], wanted, rtol=0, atol=1e-6
    )  # sines are float32's


def mixed(q, k, v, H, *, causal):
    """Multi-head attention by its definition, (U, D)."""
    out = torch.zeros_like(q)
    width = q.shape[1] // H
    for h, u in product(range(H), range(len(q))):
        part = slice(h * width, (h + 1) * width)
        last = u + 1 if causal else len(k)
        weights = (k[:last, part] @ q[u, part] / width**0.5).softmax(0)
        out[u, part] = weights @ v[:last, part]
    return out


@torch.no_grad()
def test_neither_padding_nor_the_rest_of_the_batch_matters():
    model = small()
    encoded, lengths, tokens = spoken(3, 7, 5)
    wanted = by_steps(model, encoded, lengths, tokens, chunks=[2, 3])
    for b, length in enumerate(lengths):
        encoded[b, length:] = torch.nan
    found = by_steps(model, encoded, lengths, tokens, chunks=[2, 3])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for b, length in enumerate(lengths):
        row = slice(b, b + 1)
        alone = (encoded[row, :length], lengths[row], tokens[row])
        found = by_steps(model, *alone, chunks=[2, 3])
        torch.testing.assert_close(found, wanted[row], rtol=0, atol=1e-12)


def test_rows_may_be_at_different_places_and_selected():
    model = small()
    encoded, lengths, tokens = spoken(3, 7, 6)
    with torch.no_grad():
        wanted = model.logits(encoded, lengths, tokens)
        memory = model.prefill(encoded, lengths)
        state = model.init_state(memory, 8)
        _, state = model.step(tokens[:, :4], state, memory)
        state = state._replace(
            place=torch.tensor([4, 1, 3])
        )  # later tokens do not matter
        rows = torch.tensor([2, 1])
        memory, state = map_state(lambda part: part[rows], (memory, state))
        assert {len(part) for part in state_tensors((memory, state))} == {2}
        more = torch.stack([tokens[2, 3:5], tokens[1, 1:3]])
        found, state = model.step(more, state, memory)
        assert state.place.tolist() == [5, 3]
        torch.testing.assert_close(found[0], wanted[2, 3:5], rtol=0, atol=1e-10)
        torch.testing.assert_close(found[1], wanted[1, 1:3], rtol=0, atol=1e-10)


def test_cross_weights_are_those_of_the_last_layer():
    model = small()
    encoded, lengths, tokens = spoken(3, 7, 5)
    last = model.layers[-1].cross_attention
    calls = []
    last.register_forward_hook(lambda _, given, mixed: calls.append((given, mixed)))
    with torch.no_grad():
        found = model.cross_weights(encoded, lengths, tokens)
        model.logits(encoded, lengths, tokens)
        ((x, keys, values, mask), mixed), *_ = calls
        by_head = last.weights(x, keys, mask)
        torch.testing.assert_close(found, by_head.mean(1), rtol=0, atol=1e-12)
        wanted = (by_head @ values).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mixed, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.sum(2), torch.ones(3, 5).double())
    padding = torch.arange(7) >= lengths[:, None]
    assert (found.amax(1)[padding] == 0).all()


# ---- the model


def test_everything_that_is_used_learns():
    model = small(torch.float32, ctc=True, dropout=0.5).train()
    features = torch.randn(2, 20, 4)
    lengths = torch.tensor([20, 9])
    tokens = torch.tensor([[1, 4, 5], [1, 3, 0]])
    logits, ends, ctc = model(features, lengths, tokens)
    assert (logits.shape, ctc.shape) == ((2, 3, 11), (2, 5, 12))
    assert ends.tolist() == [5, 3]
    (logits.logsumexp(-1).sum() + ctc[..., 0].sum() + logits[..., 4].sum()).backward()
    for name, weight in model.named_parameters():
        assert weight.grad.abs().sum() > 0, name


@torch.no_grad()
def test_an_optimized_model_computes_the_same():
    model = small(torch.float32)
    text = spoken(2, 5, 6, torch.float32)
    wanted = model.logits(*text)
    faster = optimize(model)
    for chunks in ([1, 5], [1] * 6):
        found = by_steps(faster, *text, chunks=chunks)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
