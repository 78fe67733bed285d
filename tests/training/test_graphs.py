"""The choice of shapes, padding, failed captures, and steps in graphs; on a GPU, equal gradients."""

import copy
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from asrkit.models import (
    AEDConfig,
    ConvConfig,
    FastConformerConfig,
    JasperConfig,
    LSTMConfig,
    LSTMEncoderConfig,
    Stage,
    TransducerConfig,
    make_model,
)
from asrkit.training import Prepared, TrainConfig, training_loss
from asrkit.training import graphs as training_graphs
from asrkit.training.graphs import Graphed, StepGraphs, graphed_training, pad_to
from asrkit.workbench.measure import host_reads

ENCODERS = {
    "conv": ConvConfig(width=16, layers=1, dropout=0.0),
    "fastconformer": FastConformerConfig(
        width=16, layers=1, heads=2, subsampling=4, subsampling_channels=8, dropout=0.0
    ),
    "lstm": LSTMEncoderConfig(width=16, dropout=0.0),
    "jasper": JasperConfig(
        bins=80,
        stages=[
            Stage(channels=16, kernel=5, repeat=1, dropout=0.0, stride=2, dense=False),
            Stage(channels=24, kernel=3, repeat=2, dropout=0.0),
        ],
    ),
}
RNNT = TransducerConfig(vocab_size=9, joint_width=16)
MODELS = {name: replace(RNNT, encoder=encoder) for name, encoder in ENCODERS.items()}
MODELS["lstm"] = replace(MODELS["lstm"], predictor=LSTMConfig(width=16, layers=2))
MODELS["decoder"] = AEDConfig(
    vocab_size=12, pad=9, bos=10, eos=11, encoder=ENCODERS["conv"], width=16, layers=1, heads=2, dropout=0.0, ctc=True,
)  # fmt: skip
each_model = pytest.mark.parametrize("name", MODELS)


class Net(nn.Module):
    """A batch norm, whose buffers a capture updates, and a layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 2)

    def forward(self, x, lengths):
        valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        normal = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.layer(normal) * valid[..., None]


def capture(view, arguments):
    """A substitute for torch's capture: it warms up, and gradients are in the same memory each time."""
    view(*arguments)
    weights = [*view.parameters()]
    memory = [torch.empty_like(weight) for weight in weights]

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with torch.enable_grad():
                results = view(*inputs[: len(arguments)])
            ctx.results = results if isinstance(results, tuple) else (results,)
            detached = tuple(result.detach() for result in ctx.results)
            return detached if isinstance(results, tuple) else detached[0]

        @staticmethod
        def backward(ctx, *incoming):
            pairs = zip(ctx.results, incoming, strict=True)
            outputs = [pair for pair in pairs if pair[0].requires_grad]
            results, incoming = zip(*outputs, strict=True)
            found = torch.autograd.grad(results, weights, incoming)
            for own, gradient in zip(memory, found, strict=True):
                own.copy_(gradient)
            return *[None] * len(arguments), *(own.detach() for own in memory)

    return lambda *inputs: Passes.apply(*inputs, *weights)


def graphed(module=None, multiple=4, capture=capture):
    return Graphed(module or Net(), multiple, capture)


def batch(T=83):
    generator = torch.Generator().manual_seed(1)
    return Prepared(
        features=torch.randn(3, T, 80, generator=generator),
        lengths=torch.tensor([T - 3, 66, 40]),
        targets=torch.randint(9, (3, 7), generator=generator),
        target_lengths=torch.tensor([7, 0, 5]),
        speech_s=2.0,
    )


def test_a_shape_is_captured_at_its_second_call(monkeypatch):
    monkeypatch.setattr(training_graphs, "MOST", 2)
    net = graphed()
    lengths = torch.ones(2)
    found = [net(torch.zeros(2, length, 3), lengths).shape[1] for length in (5, 7, 8)]
    assert found == [5, 8, 8]  # the first runs as it is
    assert net(torch.zeros(1, 5, 3), torch.ones(1)).shape[1] == 5  # another batch size
    found = [
        net(torch.zeros(2, length, 3), lengths).shape[1] for length in (1, 2, 9, 9)
    ]
    assert found == [1, 4, 9, 9]  # no more than MOST
    assert net.replayed == 3


@pytest.mark.parametrize("before, multiple, after", [
    ([[1, 1, 1]] * 2, 4, [[1, 1, 1, 0]] * 2),
    ([[[1.0, 1.0]]], 2, [[[1.0, 1.0], [0.0, 0.0]]]),
    ([1.0, 1.0], 9, [1.0, 1.0]),
    ([[]], 4, [[]]),
])  # fmt: skip
def test_padding_appends_zeros_in_dimension_1(before, multiple, after):
    assert pad_to(torch.tensor(before), multiple).tolist() == after


def test_a_failed_capture_leaves_the_module_unchanged_and_names_the_shapes():
    net = Net()
    before = copy.deepcopy(net.state_dict())
    forward = net.forward

    def fails(view, arguments):
        view(*arguments)
        view.forward = None
        raise RuntimeError("operation not permitted when stream is capturing")

    failing = graphed(net, capture=fails)
    net.eval()
    failing(torch.randn(2, 8, 3), torch.ones(2))
    net.train()
    message = "module: its passes on [(2, 8, 3), (2,)] cannot be captured: operation not permitted"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        failing(torch.randn(2, 8, 3), torch.ones(2))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert net.forward == forward
    assert net.layer.weight.grad is None


def expect_equal_steps(name, device, graphed, rtol):
    """Losses, gradients and running statistics in graphs are those of the plain passes, for a step of two batches."""
    torch.manual_seed(0)
    model = make_model(MODELS[name]).to(device).train()
    before = copy.deepcopy(model.state_dict())
    graphs = StepGraphs(model, graphed)
    config = TrainConfig(precision="float32", joint="full")
    results = []
    for passes in (graphs, None, graphs, graphs):
        model.load_state_dict(before)
        model.zero_grad()
        losses = []
        for T in (83, 90):
            loss = training_loss(model, batch(T), config, None, passes).per_label
            loss.backward()
            losses.append(loss.detach())
        gradients = [
            weight.grad.clone()
            for weight in model.parameters()
            if weight.grad is not None
        ]
        statistics = [buffer.clone() for buffer in model.buffers()]
        results.append((losses, gradients, statistics))
    assert graphs.encoder.replayed == 5
    for actual in results:
        torch.testing.assert_close(actual, results[1], rtol=rtol, atol=rtol)


@each_model
def test_a_step_in_graphs_is_that_of_the_plain_passes(name):
    expect_equal_steps(name, "cpu", partial(Graphed, capture=capture), 1e-4)


class Copies(TorchDispatchMode):
    """Collects ops on meta tensors that copy from the host, which no graph can repeat."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        on_host = any(tensor.device.type == "cpu" for tensor in tensors)
        if on_host and isinstance(result, torch.Tensor) and result.is_meta:
            self.ops.append(str(func))
        return result


@each_model
def test_both_passes_neither_read_from_the_device_nor_copy_to_it(name):
    with torch.device("meta"):
        model = make_model(MODELS[name]).train()
        features = torch.empty(3, 128, 80)
        frames = torch.empty(1, dtype=torch.long)
        lengths = torch.empty(3, dtype=torch.long)
        targets = torch.empty(3, 16, dtype=torch.long)
    encoder = training_graphs.EncoderPass(model)

    def step():
        sum(result.sum() for result in encoder(features, lengths, frames)).backward()
        if hasattr(model, "rows"):
            training_graphs.PredictorPass(model)(targets).sum().backward()

    assert host_reads(step, device="meta") == {}
    with Copies() as copies:
        step()
    assert copies.ops == []


def test_training_counts_its_replays(tiny_speech, tmp_path, monkeypatch):
    sys.path.insert(0, str(Path(__file__).parent))
    from trainings import CTC, SHORT, TRANSDUCER, losses, run

    refusals = [
        (TRANSDUCER, "module: expected one on a CUDA device, got cpu. Elsewhere call it as it is (asrkit train: without --graphs)."),
        (CTC, "graphs: expected False for a CTC model, got True."),
    ]  # fmt: skip
    for model, message in refusals:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            run(tiny_speech, tmp_path / "cpu", replace(SHORT, graphs=True), model)
    substitute = partial(StepGraphs, graphed=partial(Graphed, capture=capture))
    monkeypatch.setattr("asrkit.training.objective.StepGraphs", substitute)
    monkeypatch.setattr(training_graphs, "FRAMES", 1024)  # all batches have one shape
    model = replace(TRANSDUCER, encoder=ENCODERS["conv"], dropout=0.0)
    config = replace(SHORT, accumulate=2, batch_seconds=1.0, curriculum=(100.0, 0.0))
    plain = run(tiny_speech, tmp_path / "plain", config, model)
    found = run(tiny_speech, tmp_path / "graphs", replace(config, graphs=True), model)
    torch.testing.assert_close(losses(found), losses(plain), rtol=1e-4, atol=1e-4)
    assert found.history[-1]["replays"] > 0
    assert "replays" not in plain.history[-1]


@pytest.mark.gpu
@each_model
def test_on_a_gpu_a_step_in_graphs_is_that_of_the_plain_passes(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    expect_equal_steps(name, "cuda", graphed_training, 1e-3)


@pytest.mark.gpu
def test_on_a_gpu_graphs_work_under_autocast():
    model = make_model(MODELS["lstm"]).cuda().train()
    graphs = StepGraphs(model)
    config = TrainConfig(precision="bfloat16", joint="full")
    losses = [
        training_loss(model, batch(), config, None, passes).per_label
        for passes in (None, graphs, graphs, graphs)
    ]
    torch.testing.assert_close(
        torch.stack(losses), losses[0].expand(4), rtol=0.05, atol=0
    )


@pytest.mark.gpu
def test_on_a_gpu_a_read_inside_a_graph_is_named():
    class Reads(Net):
        def forward(self, x, lengths):
            return super().forward(x, lengths) * float(lengths.sum())

    reads = graphed_training(Reads().cuda(), 4)
    arguments = torch.ones(2, 4, 3).cuda(), torch.ones(2).cuda()
    reads(*arguments)
    with pytest.raises(RuntimeError, match=r"cannot be captured: .* waits for the GPU"):
        reads(*arguments)
