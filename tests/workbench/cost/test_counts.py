"""Counted costs against what torch's allocator and operation counter say."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asrkit.losses import pack_joint, rnnt_loss, rnnt_loss_lean, rnnt_loss_packed, split_batches
from asrkit.models import FastConformer, FastConformerConfig, LSTMEncoder, LSTMEncoderConfig
from asrkit.workbench.cost import (
    CARDS,
    VARIANTS,
    Peak,
    encoder_flops,
    encoder_parameters,
    joint_bytes,
    joint_flops,
    largest_batch,
    lstm_encoder_flops,
    lstm_encoder_parameters,
)
from asrkit.workbench.profiling import peak_memory

SHAPE = {"B": 2, "T": 66, "U1": 31, "V": 256, "D": 160}
LENGTHS, LABELS = torch.tensor([66, 42]), torch.tensor([30, 18])
NODES = int((LENGTHS * (LABELS + 1)).sum())


def step(variant, dtype, B, T, U1, V, D):
    """Loss and gradients from the halves of a joint, by one variant, as a function to call."""
    generator = torch.Generator().manual_seed(0)
    sizes = (B, T, D), (B, U1, D), (V, D), (V,)
    leaves = [
        torch.randn(size, generator=generator).mul(0.3).to(dtype).requires_grad_() for size in sizes
    ]
    encoded, predicted, weight, bias = leaves
    given = torch.randint(0, V - 1, (B, U1 - 1), generator=generator), LENGTHS, LABELS

    def join(encoded, predicted):
        return torch.nn.functional.linear(
            (encoded[:, :, None] + predicted[:, None]).relu(), weight, bias
        )

    def run():
        if variant == "split":
            loss = split_batches(join, encoded, predicted, *given, size=1)
        elif variant == "packed":
            hidden = pack_joint(encoded, predicted, *given[1:], activation="relu")
            loss = rnnt_loss_packed(torch.nn.functional.linear(hidden, weight, bias), *given)
        elif variant == "lean":
            loss = rnnt_loss_lean(*leaves, *given, impl="numba_cpu")
        else:
            impl = "numba_cpu" if variant in ("numba", "overwrite") else variant
            loss = rnnt_loss(
                join(encoded, predicted), *given, impl=impl, overwrite_logits=variant == "overwrite"
            )
        loss.backward()

    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_predicted_peak_is_within_2_percent_of_the_allocators(variant):
    predicted, run = (
        joint_bytes(variant, **SHAPE, nodes=NODES).total,
        step(variant, torch.float32, **SHAPE),
    )
    run()  # what a first call compiles and sets up is not the loss's own
    assert peak_memory(run) == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("variant", ["torchaudio", "wavefront", "numba", "split", "packed"])
def test_so_it_is_in_half_precision_where_logits_outweigh_the_workspace_of_products(variant):
    shape = SHAPE | {"D": 16}
    predicted = joint_bytes(variant, **shape, itemsize=2, nodes=NODES).total
    assert peak_memory(step(variant, torch.float16, **shape)) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("variant", ["numba", "split", "packed"])
def test_a_small_vocabulary_moves_the_peak_into_the_hidden_layer(variant):
    shape = SHAPE | {"V": 8}
    predicted = joint_bytes(variant, **shape, nodes=NODES)
    assert "logits" not in predicted.parts
    assert peak_memory(step(variant, torch.float32, **shape)) == pytest.approx(
        predicted.total, rel=0.05
    )


def test_operations_are_those_that_torch_counts():
    with FlopCounterMode(display=False) as counter:
        step("numba", torch.float32, **SHAPE)()
    N = SHAPE["B"] * SHAPE["T"] * SHAPE["U1"]
    assert counter.get_total_flops() == joint_flops(N=N, D=SHAPE["D"], V=SHAPE["V"])


def test_the_largest_batch_fits_and_one_more_does_not():
    shape = {"T": 200, "U1": 101, "V": 1024, "D": 640}
    for card in CARDS:
        for variant in VARIANTS:
            if variant == "split":  # one utterance at a time: only the halves' gradients grow
                continue
            B = largest_batch(card.gib << 30, variant, **shape)
            assert (
                joint_bytes(variant, B=B, **shape).total
                <= card.gib << 30
                < joint_bytes(variant, B=B + 1, **shape).total
            )
    assert largest_batch(1, "numba", **shape) == 0
    whole = largest_batch(16 << 30, "packed", **shape)
    assert largest_batch(16 << 30, "packed", padding=0.5, **shape) >= 2 * whole - 1


def test_rates_of_a_card_are_in_their_units():
    rated = [card for card in CARDS if card.memory_GB_per_s and card.float32_TFLOP_per_s]
    assert all(card.float32_TFLOP_per_s for card in CARDS if card.memory_GB_per_s)
    assert len(rated) >= 4
    for card in rated:
        assert 1 < card.float32_TFLOP_per_s * 1e3 / card.memory_GB_per_s < 200  # operations a byte


def test_a_wrong_variant_or_width_is_named():
    with pytest.raises(ValueError, match="variant: expected one of torchaudio"):
        joint_bytes("naive", **SHAPE)
    with pytest.raises(ValueError, match="itemsize: expected 2 or 4 bytes, got 8"):
        joint_bytes("numba", **SHAPE, itemsize=8)
    with pytest.raises(ValueError, match="padding: expected a share below 1"):
        largest_batch(1, "numba", padding=1.0, **SHAPE)
    assert Peak(parts={"a": 1, "b": 2}).total == 3


ENCODERS = [
    {}, {"subsampling": 4, "bins": 41}, {"bias": False, "kernel": 5, "expansion": 2, "heads": 2, "subsampling_channels": 24},
    {"context": (8, 8)}, {"context": (3, 1), "subsampling": 2}, {"context": (0, 0)}, {"context": (500, 3)}, {"context": (4, -1)},
]  # fmt: skip


@pytest.mark.parametrize("B, T", [(2, 200), (1, 333), (3, 1)])
@pytest.mark.parametrize("changed", ENCODERS, ids=str)
def test_operations_and_weights_of_an_encoder_are_those_that_torch_counts(changed, B, T):
    config = FastConformerConfig(
        **{"width": 32, "layers": 2, "subsampling_channels": 16, **changed}
    )
    encoder = FastConformer(config).eval()
    math = torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    )  # the counter does not see a CPU's fused attention
    with torch.inference_mode(), math, FlopCounterMode(display=False) as counter:
        encoder(torch.randn(B, T, config.bins), torch.full((B,), T))
    sizes = {
        name: getattr(config, name)
        for name in ("bins", "width", "layers", "subsampling", "kernel", "expansion")
    }
    sizes["channels"] = config.subsampling_channels
    assert encoder_flops(B=B, T=T, context=config.context, **sizes) == counter.get_total_flops()
    assert encoder_parameters(bias=config.bias, **sizes) == sum(
        weight.numel() for weight in encoder.parameters()
    )


@pytest.mark.parametrize("T", [1, 20, 24])
@pytest.mark.parametrize("changed", [{}, {"before": 1, "after": 1}, {"stack_input": 1, "stack": 3}])
def test_operations_and_weights_of_an_lstm_encoder_are_those_that_torch_counts(changed, T):
    sizes = {"bins": 8, "width": 12, "before": 2, "after": 3, **changed}
    # in float64, since the counter does not see a CPU's fused LSTM
    encoder = LSTMEncoder(LSTMEncoderConfig(**sizes)).double()
    features = torch.randn(2, T, 8, dtype=torch.float64)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        encoder(features, torch.full((2,), T))
    assert lstm_encoder_flops(B=2, T=T, **sizes) == counter.get_total_flops()
    weights = sum(weight.numel() for weight in encoder.parameters())
    assert lstm_encoder_parameters(**sizes) == weights


@pytest.mark.parametrize("wrong", [{"T": 0}, {"before": 0}, {"stack": 0}])
def test_sizes_of_no_lstm_encoder_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        lstm_encoder_flops(
            **{"B": 1, "T": 9, "bins": 80, "width": 64, "before": 2, "after": 3} | wrong
        )


@pytest.mark.parametrize("wrong", [{"B": 0}, {"T": 0}, {"subsampling": 3}, {"kernel": 0}])
def test_sizes_of_no_encoder_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        encoder_flops(**{"B": 1, "T": 100, "bins": 80, "width": 64, "layers": 1} | wrong)


@pytest.mark.parametrize("variant", ["wavefront", "packed"])
def test_an_utterance_smaller_than_a_tile_needs_no_tile(variant, monkeypatch):
    sizes = {"B": 2, "T": 16, "U1": 9, "V": 64, "D": 16}
    monkeypatch.setitem(globals(), "LENGTHS", torch.tensor([16, 10]))
    monkeypatch.setitem(globals(), "LABELS", torch.tensor([8, 5]))
    run = step(variant, torch.float32, **sizes)
    run()
    nodes = int((LENGTHS * (LABELS + 1)).sum())
    predicted = joint_bytes(variant, **sizes, nodes=nodes).total
    assert peak_memory(run) == pytest.approx(predicted, rel=0.05)
