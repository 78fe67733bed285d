"""Cases of a step that nothing holds up: passes as CUDA graphs, and reads of the host."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.models.transducer import LSTMPredictor
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.profiling import host_reads, launch_profile
from asrkit.workbench.records import Measurement

if TYPE_CHECKING:  # training needs packages that a bare GPU machine lacks
    from asrkit.training import Prepared

GRAPH_LENGTHS = (140, 280, 558)  # stacked frames; the last is the longest batch of the round


def cases(device: str, quick: bool) -> Iterator[Case]:
    """Graphs on a GPU only; reads of one step.

    Args:
        device: "cpu" or "cuda".
        quick: The shortest graph only.
    """
    if device.startswith("cuda"):
        yield graphs_case(device, quick)
    yield Case(
        what="training-step-reads",
        measure=functools.partial(count_reads, device),
        params={"dtype": "float32"},
    )


class Halves(nn.Module):
    """Encoder and predictor of MLPerf's RNN-T at its sizes, without masks and joint."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LSTM(240, 1024, 2, batch_first=True)
        self.after = nn.LSTM(2048, 1024, 3, batch_first=True)
        self.predictor = LSTMPredictor(1024, LSTMConfig(width=512, layers=2))

    def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T / 2, 1024) and predictions (B, U, 512) of features (B, T, 240)."""
        frames, _ = self.before(features)
        pairs = frames.unflatten(1, (-1, 2)).flatten(2)
        encoded, _ = self.after(pairs)
        predicted, _ = self.predictor(labels, None)
        return encoded, predicted


def graphs_case(device: str, quick: bool) -> Case:
    """Forward and backward pass of both halves at batch 16: launched one by one, and as graphs.

    Args:
        device: A GPU.
        quick: The shortest length only.
    """
    from asrkit.training.graphs import graphed_training

    B = 16
    lengths = GRAPH_LENGTHS[:1] if quick else GRAPH_LENGTHS
    torch.manual_seed(0)
    halves = Halves().to(device)
    samples = []
    for T in lengths:
        features = torch.randn(B, T, 240, device=device)
        samples.append((features, torch.zeros(B, T, dtype=torch.long, device=device)))
    graphed = graphed_training(halves, samples, lengths)
    passes: dict[str, Callable[..., Any]] = {"launched": halves, "graphed": graphed}
    arms = {}
    for name, run in passes.items():
        arms[name] = functools.partial(one_pass, run, samples[-1], list(halves.parameters()))
    shape = [B, lengths[-1], lengths[-1], 1024]
    return Case(
        what="training-graphs",
        arms=arms,
        params={"shape": shape, "dtype": "float32"},
        tolerance=1e-4,
        memory=True,
    )


def one_pass(
    run: Callable[..., Any], arguments: tuple[Tensor, ...], parameters: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Sum of the squared outputs of a module, and the norm of its gradient.

    Args:
        run: The module, or its graphs.
        arguments: Of the module.
        parameters: Of the module.
    """
    loss = sum(output.square().sum() for output in run(*arguments))
    grads = torch.autograd.grad(loss, parameters)
    norms = torch._foreach_norm(grads)
    return loss.detach().clone(), torch.linalg.vector_norm(torch.stack(norms))


def count_reads(device: str) -> Iterator[Measurement]:
    """Lines that wait for the device in a step of the default model, as often as they do.

    On a CPU they are counted on tensors without numbers; on a GPU also as the driver saw them.

    Args:
        device: "cpu" or "cuda".
    """
    place = "cuda" if device.startswith("cuda") else "meta"
    step = make_step(place)
    step()
    reads = host_reads(step, device=place)
    params = {"dtype": "float32", "sites": dict(reads)}
    value = float(reads.total())
    yield Measurement("training-step-reads", "reads", "1", value, params=params, impl="asrkit")
    if place == "cuda":
        waits = float(launch_profile(step, device="cuda").stream_syncs or 0)
        yield Measurement("training-step-reads", "waits", "1", waits, params=params, impl="driver")


def make_step(device: str) -> Callable[[], Tensor]:
    """A step from a batch on the host to the weights, with fused AdamW where there are numbers.

    Args:
        device: Of the model: "cpu", "cuda" or "meta".
    """
    from asrkit.training import TrainConfig, training_loss, update

    config = TrainConfig(precision="float32", joint="full")
    with torch.device(device):
        model = TransducerModel(TransducerConfig(vocab_size=27)).train()
    batch = noise_batch("cpu")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    if device == "meta":  # where torch refuses fused optimizers
        optimizer.skips_non_finite = True
        batch = noise_batch("meta")
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> Tensor:
        """Forward, backward and update; returns the norm of the gradient."""
        return update(model, optimizer, training_loss(model, batch, config).per_label, config)

    return step


def noise_batch(device: str) -> "Prepared":
    """Four random utterances of two seconds; lengths and targets on the host.

    Args:
        device: Of the features.
    """
    from asrkit.training import Prepared

    generator = torch.Generator().manual_seed(0)
    return Prepared(
        features=torch.randn(4, 200, 80, generator=generator).to(device),
        lengths=torch.tensor([200, 180, 150, 120]),
        targets=torch.randint(27, (4, 20), generator=generator),
        target_lengths=torch.tensor([20, 18, 15, 12]),
        speech_s=0.0,
    )
