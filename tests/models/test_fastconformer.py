"""FastConformer: attention is its definition, half precision stays near float32, gradients agree with differences."""

import copy
import dataclasses
import shutil
import sys
from pathlib import Path

import pytest
import torch

from asrkit.models import (
    Checkpoint,
    TransducerModel,
    limit_context,
    load_checkpoint,
    presets,
    save_checkpoint,
)
from asrkit.models.fastconformer import ConformerBlock
from asrkit.models.relative_attention import (
    RelativeAttention,
    distance_range,
    relative_positions,
)
from asrkit.text import CharTokenizer

sys.path.append(str(Path(__file__).resolve().parent))
from conformers import SMALL, build

ALL = (-1, -1)


def attention_pair_by_pair(attention, x, context):
    """The definition: scores of every pair (i, j) that `context` allows, from the sinusoid of their distance."""
    T, D = x.shape
    H = attention.heads
    q, k, v = attention.qkv(x).view(T, 3, H, -1).unbind(1)
    positions = relative_positions(T, -T, D, x)
    p = attention.position(positions).view(2 * T + 1, H, -1)
    left, right = (T if side < 0 else side for side in context)
    rows = []
    for i in range(T):
        near = [j for j in range(T) if -right <= i - j <= left]
        for h in range(H):
            by_content = q[i, h] + attention.content_bias[h, 0]
            by_position = q[i, h] + attention.position_bias[h, 0]
            scores = [
                by_content @ k[j, h] + by_position @ p[T - i + j, h] for j in near
            ]
            share = (torch.stack(scores) / (D // H) ** 0.5).softmax(0)
            rows.append(share @ v[near, h])
    return attention.out(torch.stack(rows).view(T, D))


@pytest.mark.parametrize("T", [1, 2, 13])
@pytest.mark.parametrize(
    "context", [ALL, (2, 1), (0, 3), (3, 0), (0, 0), (-1, 0), (2, -1), (20, 20)]
)
@torch.no_grad()
def test_attention_equals_its_definition_pair_by_pair(T, context):
    torch.manual_seed(0)
    attention = RelativeAttention(16, 2, dropout=0.0, bias=True).double().eval()
    torch.nn.init.normal_(attention.content_bias)
    torch.nn.init.normal_(attention.position_bias)
    x = torch.randn(2, T + 2, 16).double()
    valid = torch.ones(2, T + 2, dtype=torch.bool)
    valid[1, T:] = False  # masked frames have no influence
    positions = relative_positions(*distance_range(T + 2, context), 16, x)
    out = attention(x, valid, positions, context)
    for row, n in ((0, T + 2), (1, T)):
        wanted = attention_pair_by_pair(attention, x[row, :n], context)
        torch.testing.assert_close(out[row, :n], wanted)


@pytest.mark.parametrize("context", [ALL, (3, 2)])
@pytest.mark.parametrize(
    "dtype, near", [(torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=str
)
def test_half_precision_is_near_float32_and_blind_to_padding(context, dtype, near):
    features = torch.randn(4, 90, 80)
    lengths = torch.tensor([90, 33, 1, 8])
    for b, length in enumerate(lengths):
        features[b, length:] = torch.nan
    exact, ends = build(context=context)(features, lengths)
    half, _ = build(context=context).to(dtype)(features, lengths)
    assert half.dtype == dtype
    for b, end in enumerate(ends):
        error = (half[b].float() - exact[b])[:end].norm() / exact[b, :end].norm()
        assert 1e-5 < error < near
        assert not half[b, end:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_as_large_as_the_dtype_stay_finite(dtype):
    encoder = build(scale_input=True)
    with torch.no_grad():
        for block in encoder.blocks:
            block.attention.qkv.weight.mul_(25)  # scores of tens of thousands
    encoded, _ = encoder.to(dtype)(torch.randn(2, 90, 80), torch.tensor([90, 77]))
    assert encoded.isfinite().all()


def test_every_dropout_drops_in_training_and_never_otherwise():
    batch = torch.randn(2, 40, 80), torch.tensor([40, 30])
    kinds = "dropout dropout_attention dropout_input dropout_positions".split()
    off = dict.fromkeys(kinds, 0.0)
    plain = build(**off)
    wanted = plain(*batch)[0]
    trained = plain.train()(*batch)[0]
    for kind in kinds:
        dropping = build(**off | {kind: 0.5})
        torch.testing.assert_close(dropping(*batch)[0], wanted)
        assert not torch.allclose(dropping.train()(*batch)[0], trained), kind


@pytest.mark.parametrize("context", [ALL, (1, 1)])
def test_gradients_of_a_block_in_training_agree_with_differences_and_come_twice(
    context,
):
    """With the batch's own statistics, and what is computed in place; of the frames that count, as later blocks use no other."""
    torch.manual_seed(0)
    T, D = 6, 4
    sizes = {"width": D, "kernel": 3, "expansion": 2, "dropout": 0.0}
    block = ConformerBlock(dataclasses.replace(SMALL, **sizes)).double().train()
    for bias in (block.attention.content_bias, block.attention.position_bias):
        torch.nn.init.normal_(bias)
    x = torch.randn(2, T, D, dtype=torch.double, requires_grad=True)
    valid = torch.arange(T) < torch.tensor([[T], [T - 3]])
    positions = relative_positions(*distance_range(T, context), D, x)
    given = (x, *block.parameters())

    def computed(x, *_):
        return block(x, valid, positions, context)[valid]

    assert torch.autograd.gradcheck(computed, given)
    cost = computed(x).square().sum()
    first = torch.autograd.grad(cost, given, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(cost, given)))


def test_a_limited_context_is_remembered_by_a_checkpoint(tmp_path):
    model = TransducerModel(presets.tiny(vocab_size=28))
    limit_context(model, (2, 1))
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, Checkpoint(model, CharTokenizer(), {}, {}))
    model = load_checkpoint(path).model
    assert model.config.encoder.context == (2, 1) == model.encoder.config.context


@pytest.mark.live
@pytest.mark.parametrize("context", [ALL, (4, 4)])
@torch.no_grad()
def test_it_compiles_into_one_graph_for_any_length(context):
    encoder = build(context=context, layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True, dynamic=True)
    for T, lengths in [(120, [120, 90]), (136, [100, 136]), (200, [200, 3])]:
        batch = torch.randn(2, T, 80), torch.tensor(lengths)
        wanted = encoder(*batch)[0]
        torch.testing.assert_close(compiled(*batch)[0], wanted, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile for a CPU needs g++"
)
@pytest.mark.parametrize("context", [ALL, (4, 4)])
def test_compiled_training_has_the_gradients_of_eager_float64(context):
    sizes = {"dropout": 0.0, "width": 32, "layers": 1, "subsampling_channels": 8}
    encoder = build(context=context, **sizes).train()
    features = torch.randn(2, 200, 80)
    lengths = torch.tensor([200, 150])
    exact = _gradients(copy.deepcopy(encoder).double(), features.double(), lengths)
    torch._dynamo.reset()
    found = _gradients(torch.compile(encoder, fullgraph=True), features, lengths)
    torch._dynamo.reset()
    for name, gradient in exact.items():
        if name.endswith("depthwise.bias"):
            continue  # the batch norm after it removes it: zero but for rounding
        error = (found[name].double() - gradient).norm() / (gradient.norm() + 1e-3)
        assert error < 1e-3, (name, error)


def _gradients(encoder, features, lengths):
    encoded = encoder(features, lengths)[0]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(encoded.shape, generator=generator).to(encoded.dtype)
    (encoded * weights).sum().backward()
    return {
        name.removeprefix("_orig_mod."): parameter.grad
        for name, parameter in encoder.named_parameters()
    }
