"""The suite of training steps: the joint whole, with logits made float32 or left as they are, and
the lean loss; then an LSTM encoder in phases (`phases`), and on a GPU passes as CUDA graphs.

All arms of a training step start from one model and take one step on one batch: forward, backward,
clipping, AdamW. The learning rate is 0, so that every call computes the same loss and its gradient.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.models.transducer import LSTMPredictor
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.suites import phases
from asrkit.workbench.measure.ops import dtype_name

if TYPE_CHECKING:  # training needs packages that a bare GPU machine lacks
    from asrkit.training import Prepared
    from asrkit.training.config import Joint

# utterances, feature frames of 10 ms, labels, tokens with blank
DEMO = (7, 160, 27, 28)  # the median batch of `asrkit train` on the spoken digits
SIZES = (DEMO, (*DEMO[:3], 1024), (16, 400, 40, 1024))
QUICK = ((2, 80, 6, 28),)
GRAPH_LENGTHS = (140, 280, 558)  # stacked frames; the last is the longest batch of the round
# relative distance of losses and gradient norms that rounding of the joint's products excuses
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Float32Linear(nn.Linear):
    """A linear layer whose output is float32 under autocast too, as training had it before."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (..., V) of inputs (..., D)."""
        return super().forward(x).float()


def suite(device: str, quick: bool) -> Iterator[Case]:
    """A case for each size and dtype: float32, and bfloat16 where the hardware computes in it.

    Then those of an LSTM encoder, and on a GPU graphs.

    Args:
        device: "cpu" or "cuda".
        quick: One small size only.

    Raises:
        ModuleNotFoundError: asrkit.training needs a package that this machine lacks.
    """
    from asrkit.training import TrainConfig

    dtypes = [torch.float32]
    native = TrainConfig().dtype(torch.device(device))
    if native != torch.float32:
        dtypes.append(native)
    for size in QUICK if quick else SIZES:
        for dtype in dtypes:
            yield training_case(size, dtype, device)
    yield from phases.cases(device, quick)
    if device.startswith("cuda"):
        yield graphs_case(device, quick)


def training_case(size: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Case:
    """One training step of the default model: both ways to compute the loss, in one autocast dtype.

    Args:
        size: Utterances, feature frames, labels, and tokens with blank.
        dtype: Autocast dtype; float32 for none.
        device: "cpu" or "cuda".
    """
    from asrkit.training import Prepared

    B, frames, U, V = size
    generator = torch.Generator().manual_seed(0)
    batch = Prepared(
        features=torch.randn(B, frames, 80, generator=generator).to(device),
        lengths=torch.linspace(frames, 0.7 * frames, B).long().to(device),
        targets=torch.randint(V - 1, (B, U), generator=generator).to(device),
        target_lengths=torch.linspace(U, 0.7 * U, B).long().to(device),
        speech_s=0.0,
    )
    torch.manual_seed(0)
    model = TransducerModel(TransducerConfig(vocab_size=V - 1)).to(device).train()
    before = copy.deepcopy(model)
    before.output.__class__ = Float32Linear
    arms: dict[str, Callable[..., Any]] = {
        "full_float32_logits": Stepper(before, batch, "full", dtype),
        "full": Stepper(copy.deepcopy(model), batch, "full", dtype),
        "lean": Stepper(model, batch, "lean", dtype),
    }
    pairs = [("full", "lean")]
    if dtype == torch.float32:
        del arms["full_float32_logits"]  # the same
    else:
        pairs = [("full_float32_logits", "full"), ("full_float32_logits", "lean"), *pairs]
    T = model.encode(batch.features, batch.lengths)[0].shape[1]
    return Case(
        what="training-step",
        arms=arms,
        params={
            "shape": [B, T, U + 1, V],
            "joint_width": model.config.joint_width,
            "dtype": dtype_name(dtype),
        },
        ratios=pairs,
        tolerance=TOLERANCES[dtype],
        memory=True,
    )


class Stepper:
    """Calls make one training step on a batch; loss per label in nats and norm of the gradient.

    Args:
        model: In training mode.
        batch: Features and targets.
        joint: "full" or "lean".
        dtype: Autocast dtype; float32 for none.
    """

    def __init__(
        self, model: TransducerModel, batch: "Prepared", joint: "Joint", dtype: torch.dtype
    ) -> None:
        from asrkit.training import TrainConfig

        precision: Any = dtype_name(dtype)
        self.model = model
        self.batch = batch
        self.config = TrainConfig(joint=joint, precision=precision)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    def __call__(self) -> tuple[Tensor, Tensor]:
        from asrkit.training import training_loss, update

        torch.manual_seed(0)  # the encoder's dropout
        loss = training_loss(self.model, self.batch, self.config).per_label
        norm = update(self.model, self.optimizer, loss, self.config)
        return loss.detach(), norm


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
        arms[name] = partial(one_pass, run, samples[-1], list(halves.parameters()))
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


SUITE = Suite(name="training", cases=suite, gpu_tests=("tests/training/test_graphs.py",))
