import copy
import dataclasses
import shutil

import pytest
import torch

from asrkit.models import (
    Checkpoint,
    FastConformer,
    FastConformerConfig,
    TransducerModel,
    limit_context,
    load_checkpoint,
    presets,
    save_checkpoint,
)
from asrkit.models.attention import RelativeAttention, attended, relative_positions
from asrkit.models.fastconformer import ConformerBlock
from asrkit.text import CharTokenizer

SMALL = FastConformerConfig(
    width=16, layers=2, heads=2, subsampling=4, subsampling_channels=4
)


def build(**changes) -> FastConformer:
    torch.manual_seed(0)
    encoder = FastConformer(dataclasses.replace(SMALL, **changes))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # no bias stays zero
        for block in encoder.blocks:
            block.batch_norm.running_mean.normal_()
            block.batch_norm.running_var.uniform_(0.5, 2)
    return encoder.eval()


def attention_pair_by_pair(attention, x, context):
    """The definition: scores of every pair (i, j) that `context` allows, from the sinusoid of their distance."""
    T, D = x.shape
    q, k, v = attention.qkv(x).view(T, 3, attention.heads, -1).unbind(1)
    p = attention.position(relative_positions(T, -T, D, x)).view(
        2 * T + 1, attention.heads, -1
    )
    left, right = (T if side < 0 else side for side in context)
    rows = []
    for i in range(T):
        near = [j for j in range(T) if -right <= i - j <= left]
        for h in range(attention.heads):
            ours = [(q[i, h] + attention.content_bias[h, 0]) @ k[j, h] for j in near]
            theirs = [
                (q[i, h] + attention.position_bias[h, 0]) @ p[T - (i - j), h]
                for j in near
            ]
            share = (
                (torch.stack(ours) + torch.stack(theirs))
                / (D // attention.heads) ** 0.5
            ).softmax(0)
            rows.append(share @ v[near, h])
    return attention.out(torch.stack(rows).view(T, D))


@pytest.mark.parametrize("T", [1, 2, 5, 13])
@pytest.mark.parametrize(
    "context", [(-1, -1), (2, 1), (0, 3), (3, 0), (0, 0), (-1, 0), (2, -1), (20, 20)]
)
def test_attention_equals_its_definition_pair_by_pair(T, context):
    torch.manual_seed(0)
    attention = RelativeAttention(16, 2, dropout=0.0, bias=True).double().eval()
    torch.nn.init.normal_(attention.content_bias)
    torch.nn.init.normal_(attention.position_bias)
    x = torch.randn(2, T + 2, 16).double()
    valid = torch.ones(2, T + 2, dtype=torch.bool)
    valid[1, T:] = False  # what is masked is as if it were not there
    positions = relative_positions(*attended(T + 2, context), 16, x)
    out = attention(x, valid, positions, context)
    torch.testing.assert_close(out[0], attention_pair_by_pair(attention, x[0], context))
    torch.testing.assert_close(
        out[1, :T], attention_pair_by_pair(attention, x[1, :T], context)
    )


@pytest.mark.parametrize("context", [(-1, -1), (3, 2), (1, 0), (0, -1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_lies_in_the_padding_cannot_matter_in_any_dtype_or_context(context, dtype):
    encoder, features = build(context=context).to(dtype), torch.randn(4, 90, 80)
    lengths = torch.tensor([90, 33, 1, 8])
    for b, length in enumerate(lengths.tolist()):
        features[b, length:] = float("nan")
    encoded, out = encoder(features, lengths)
    assert encoded.dtype == dtype and encoded.isfinite().all()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    for b, length in enumerate(lengths.tolist()):
        alone, _ = encoder(features[b : b + 1, :length], lengths[b : b + 1])
        torch.testing.assert_close(
            encoded[b, : out[b]], alone[0], atol=tolerance, rtol=tolerance
        )
        assert not encoded[b, out[b] :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32_and_scores_as_large_as_the_dtype_stay_finite(
    dtype,
):
    encoder, features, lengths = (
        build(),
        torch.randn(2, 200, 80),
        torch.tensor([200, 77]),
    )
    exact, out = encoder(features, lengths)
    half, _ = build().to(dtype)(features, lengths)
    error = (half.float() - exact)[0].norm() / exact[0].norm()
    assert 1e-5 < error < {torch.bfloat16: 0.03, torch.float16: 0.004}[dtype]
    encoder = build(scale_input=True)
    with torch.no_grad():
        for block in encoder.blocks:
            block.attention.qkv.weight.mul_(25)  # scores of tens of thousands
    assert encoder.to(dtype)(features, lengths)[0].isfinite().all()


def test_the_input_is_scaled_by_the_root_of_the_width_and_only_if_asked():
    plain, scaled = build(), build(scale_input=True)
    with torch.no_grad():
        for parameter in scaled.subsampling.out.parameters():
            parameter.div_(4)
    features, lengths = torch.randn(1, 40, 80), torch.tensor([40])
    torch.testing.assert_close(
        plain(features, lengths)[0], scaled(features, lengths)[0]
    )


@pytest.mark.parametrize("context", [(-1, -1), (4, 4)])
def test_it_compiles_into_one_graph_for_any_length(context):
    encoder = build(context=context, layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for T, lengths in [(120, [120, 90]), (136, [100, 136]), (200, [200, 3])]:
            features, lengths = torch.randn(2, T, 80), torch.tensor(lengths)
            torch.testing.assert_close(
                compiled(features, lengths)[0],
                encoder(features, lengths)[0],
                atol=1e-5,
                rtol=1e-4,
            )
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name", ["dropout", "dropout_attention", "dropout_input", "dropout_positions"]
)
def test_every_dropout_drops_in_training_and_never_otherwise(name):
    features, lengths = torch.randn(2, 40, 80), torch.tensor([40, 30])
    off = dict.fromkeys(
        ("dropout", "dropout_attention", "dropout_input", "dropout_positions"), 0.0
    )
    plain, dropping = build(**off), build(**off | {name: 0.5})
    torch.testing.assert_close(
        plain(features, lengths)[0], dropping(features, lengths)[0]
    )
    plain, dropping = plain.train(), dropping.train()
    assert not torch.allclose(
        plain(features, lengths)[0], dropping(features, lengths)[0]
    )


@pytest.mark.parametrize("context", [(-1, -1), (3, 2)])
def test_every_parameter_gets_a_gradient_that_agrees_with_differences(context):
    encoder = build(
        layers=1, width=4, subsampling_channels=2, dropout=0.0, context=context
    ).double()
    features, lengths = (
        torch.randn(2, 60, 80, dtype=torch.float64),
        torch.tensor([60, 41]),
    )
    weight = encoder.blocks[0].attention.position.weight
    assert torch.autograd.gradcheck(
        lambda w: _with(encoder, w, features, lengths),
        weight.detach().clone().requires_grad_(),
    )
    encoder(features, lengths)[0].square().sum().backward()
    assert [
        name for name, parameter in encoder.named_parameters() if parameter.grad is None
    ] == []


@pytest.mark.parametrize("context", [(-1, -1), (1, 1)])
def test_gradients_of_a_block_in_training_agree_with_differences_and_come_twice(
    context,
):
    """With the batch's own statistics, and what is computed in place; of the frames that count, as later blocks use no other."""
    torch.manual_seed(0)
    T, D = 6, 4
    block = (
        ConformerBlock(
            dataclasses.replace(SMALL, width=D, kernel=3, expansion=2, dropout=0.0)
        )
        .double()
        .train()
    )
    for bias in (block.attention.content_bias, block.attention.position_bias):
        torch.nn.init.normal_(bias)
    x, valid = (
        torch.randn(2, T, D, dtype=torch.double, requires_grad=True),
        torch.arange(T) < torch.tensor([[T], [T - 3]]),
    )
    positions, given = (
        relative_positions(*attended(T, context), D, x),
        (x, *block.parameters()),
    )
    assert torch.autograd.gradcheck(
        lambda x, *_: block(x, valid, positions, context)[valid], given
    )
    cost = block(x, valid, positions, context)[valid].square().sum()
    first, second = (
        torch.autograd.grad(cost, given, retain_graph=True),
        torch.autograd.grad(cost, given),
    )
    assert all(
        torch.equal(one, other) for one, other in zip(first, second, strict=True)
    )


def _with(encoder, weight, features, lengths):
    return torch.func.functional_call(
        encoder, {"blocks.0.attention.position.weight": weight}, (features, lengths)
    )[0]


def test_limited_context_reaches_as_far_as_the_layers_let_it_and_is_remembered(
    tmp_path,
):
    model = TransducerModel(presets.tiny(vocab_size=28)).eval()
    limit_context(model, (2, 1))
    save_checkpoint(
        tmp_path / "model.safetensors", Checkpoint(model, CharTokenizer(), {}, {})
    )
    model = load_checkpoint(tmp_path / "model.safetensors").model
    assert model.config.encoder.context == (2, 1) == model.encoder.config.context
    features, lengths = torch.randn(1, 800, 80), torch.tensor([800])
    moved = features.clone()
    moved[0, 400] += 1
    with torch.no_grad():
        changed = (
            (model.encoder(features, lengths)[0] != model.encoder(moved, lengths)[0])
            .any(-1)[0]
            .nonzero()[:, 0]
        )
    reach = model.encoder.config.layers * (2 + 4)  # attention and half the kernel
    assert (
        50 - reach - 1 <= changed.min()
        and changed.max() <= 50 + reach + 1
        and len(changed) > 3
    )
    limit_context(model, (-1, -1))
    assert model.encoder.config.context == (-1, -1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"context": (1,)},
            r"context: expected \(left, right\) in encoder frames, -1 for all",
        ),
        ({"heads": 3}, "heads: expected a divisor of width=16"),
    ],
)
def test_contradictions_fail_at_birth(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_limiting_the_context_of_another_encoder_is_refused():
    with pytest.raises(
        ValueError, match="model: expected one with a FastConformer, got Linear"
    ):
        limit_context(torch.nn.Linear(2, 2), (1, 1))


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile for a CPU needs g++"
)
@pytest.mark.parametrize("context", [(-1, -1), (4, 4)])
def test_compiled_training_has_the_gradients_of_eager_float64(context):
    encoder = build(
        context=context, dropout=0.0, width=32, layers=1, subsampling_channels=8
    ).train()
    features, lengths = torch.randn(2, 200, 80), torch.tensor([200, 150])
    exact = _gradients(copy.deepcopy(encoder).double(), features.double(), lengths)
    torch._dynamo.reset()
    found = _gradients(torch.compile(encoder, fullgraph=True), features, lengths)
    torch._dynamo.reset()
    for name, gradient in exact.items():
        if name.endswith(
            "depthwise.bias"
        ):  # the batch norm behind it takes it away: zero but for rounding
            continue
        error = (found[name].double() - gradient).norm() / (gradient.norm() + 1e-3)
        assert error < 1e-3, (name, error)


def _gradients(encoder, features, lengths):
    encoded = encoder(features, lengths)[0]
    weights = torch.randn(encoded.shape, generator=torch.Generator().manual_seed(1)).to(
        encoded.dtype
    )
    (encoded * weights).sum().backward()
    return {
        name.removeprefix("_orig_mod."): parameter.grad
        for name, parameter in encoder.named_parameters()
    }
