"""A step reads nothing from the device, and a loss or gradient that is not finite changes nothing."""

import copy
import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from asrkit.models import (
    AEDConfig,
    ConvConfig,
    CTCConfig,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    presets,
)
from asrkit.optim import Lamb, NovoGrad
from asrkit.text import CharTokenizer
from asrkit.training import Prepared, TrainConfig, update
from asrkit.training.distributed import Processes
from asrkit.training.loop import Run
from asrkit.workbench.measure import host_reads

FULL = TrainConfig(joint="full", precision="float32", peak_lr=1e-3)
LEAN = replace(FULL, joint="lean")


@pytest.fixture
def fused_on_meta():
    """Lets torch's fused optimizers take meta tensors; their kernels can compute the shapes."""
    name = "torch.optim.optimizer._get_fused_kernels_supported_devices"
    with mock.patch(name, return_value=["cpu", "cuda", "meta"]):
        yield


def on_meta(B, T, U, V):
    """A batch with features on \"meta\", and lengths and targets on the host."""
    return Prepared(
        features=torch.empty(B, T, 80, device="meta"),
        lengths=torch.linspace(T, 0.7 * T, B).long(),
        targets=torch.arange(B * U).view(B, U) % (V - 1),
        target_lengths=torch.linspace(U, 0.5 * U, B).long(),
        speech_s=0.0,
    )


ENCODERS = [ConvConfig(layers=1), FastConformerConfig(layers=1)]
TRANSDUCERS = [
    TransducerConfig(
        vocab_size=9, encoder=encoder, predictor=LSTMConfig(width=16), dropout=0.1, durations=durations,
    )
    for encoder, durations in zip(ENCODERS, ((), (0, 1, 2)), strict=True)
]  # fmt: skip
CTC = [
    CTCConfig(vocab_size=9, encoder=encoder)
    for encoder in (*ENCODERS, presets.mini_jasper().encoder)
]
ATTENTION = AEDConfig(
    vocab_size=12, pad=9, bos=10, eos=11, encoder=ENCODERS[0], layers=2, ctc=True
)


def steps_of_a_run(model_config, config, speech, out, device, batch):
    """A call that takes the first two steps of a run."""
    tokenizer = CharTokenizer()
    place = torch.device(device)
    run = Run(model_config, tokenizer, speech, out, config, place, Processes())

    def steps():
        batches = iter([[batch] * config.accumulate] * 2)
        run.take_step(batches)
        run.take_step(batches)  # completes the line of the first
        assert len(run.history) == 1

    return steps


@pytest.mark.parametrize("model_config, config", [
    *itertools.product(TRANSDUCERS, (FULL, replace(LEAN, optimizer="lamb"))),
    *itertools.product(CTC, [replace(FULL, optimizer="novograd")]),
    (ATTENTION, replace(FULL, smoothing=0.1, accumulate=2)),
    *itertools.product(TRANSDUCERS[:1], [
        replace(FULL, precision="float16", optimizer=optimizer)
        for optimizer in ("adamw", "lamb", "novograd")
    ]),
])  # fmt: skip
def test_no_step_of_a_run_reads_from_the_device(
    model_config, config, fused_on_meta, tiny_speech, tmp_path
):
    batch = on_meta(B=3, T=40, U=4, V=10)
    steps = steps_of_a_run(model_config, config, tiny_speech, tmp_path, "meta", batch)
    assert host_reads(steps, device="meta") == {}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_on_a_gpu_torch_finds_no_wait_in_a_step(precision, tiny_speech, tmp_path):
    config = replace(LEAN, precision=precision)
    batch = on_meta(B=3, T=40, U=4, V=10)
    batch = batch._replace(features=torch.randn(batch.features.shape))
    call = (TRANSDUCERS[0], config, tiny_speech, tmp_path, "cuda", batch)
    steps = steps_of_a_run(*call)
    steps()  # compiles kernels
    steps = steps_of_a_run(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")


OPTIMIZERS = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW by foreach": torch.optim.AdamW,
    "LAMB": lambda parameters: Lamb(
        parameters, lr=0.1, betas=(0.9, 0.98), weight_decay=0.01
    ),
    "NovoGrad": lambda parameters: NovoGrad(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


NOT_FINITE = {
    "gradient": lambda layer, x, bad: layer(x * bad).square().sum(),
    "loss alone": lambda layer, x, bad: 0 * layer(x).sum() + bad,  # its gradient is 0
}


@pytest.mark.parametrize("case", NOT_FINITE)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loss_or_gradient_that_is_not_finite_changes_no_bit(name, bad, case):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](layer.parameters())
    x = torch.randn(4, 3)
    update(layer, optimizer, layer(x).square().sum(), FULL)
    before = copy.deepcopy((layer.state_dict(), optimizer.state_dict()["state"]))
    norm = update(layer, optimizer, NOT_FINITE[case](layer, x, bad), FULL)
    assert not norm.isfinite()
    after = (layer.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    update(layer, optimizer, layer(x).square().sum(), FULL)  # the next step counts
    assert not torch.equal(layer.weight, before[0]["weight"])
    assert not hasattr(optimizer, "found_inf")


def test_an_optimizer_that_clips_gets_unclipped_gradients_and_their_norm():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    x = 100 * torch.randn(4, 3)  # a norm far above FULL.clip
    gradients = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()])
    lamb = Lamb(
        layer.parameters(), lr=0.1, betas=(0.9, 0.98), weight_decay=0.01, clip=math.inf
    )
    norm = update(layer, lamb, layer(x).square().sum(), FULL)
    assert norm > FULL.clip
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients))
    averages = [lamb.state[weight]["exp_avg"] for weight in layer.parameters()]
    torch.testing.assert_close(averages, [0.1 * gradient for gradient in gradients])
