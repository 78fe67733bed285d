"""What one turn of windowed looping asks of a GPU, counted without one.

The tensors are fakes on a CUDA device: they have shapes and no memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asrkit.decoders.states import map_state
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.steps import Confidence, GreedyModel, GreedyOptions
from asrkit.models import TransducerConfig, TransducerModel
from asrkit.workbench.profiling.launches import CountOps, Launches

B = 4  # launches depend on the parts of a model, not on sizes
T = 16


def turn_launches(
    config: TransducerConfig,
    *,
    fused: bool,
    window: int = GreedyOptions.window,
    confidence: Confidence = "none",
    autocast: torch.dtype | None = None,
) -> Launches:
    """Launches of one captured turn: those of the model, and those around it.

    An op of torch counts as one kernel, which products and an LSTM's cell are on a GPU; so does a
    Triton kernel.

    Args:
        config: The model.
        fused: Whether the turn runs in Triton kernels, which needs triton as it would on a GPU.
        window: Frames that a turn looks at.
        confidence: Confidence that is computed with every label.
        autocast: dtype of torch.autocast; None for none.
    """
    with FakeTensorMode(), torch.inference_mode(), _autocast_on_cuda(autocast):
        model = _with_weights_on_gpu(TransducerModel(config).eval())
        encoded = torch.zeros(B, T, config.joint_width, device="cuda")
        greedy = GreedyModel(model, confidence, encoded.device)
        carry = map_state(torch.zeros_like, greedy.initial_carry(encoded))
        options = GreedyOptions(window=window)
        reason = "as asked"
        if fused:
            reason = ""
        loop = GraphLoop(B, T, greedy, encoded, carry, options, unfused_because=reason)
        loop.load(encoded, torch.full((B,), T, device="cuda"), carry)
        with CountOps("cuda") as count:
            loop.turn(greedy)
    return count.result()


@contextmanager
def _autocast_on_cuda(dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast as at a capture. torch.autocast turns itself off where there is no GPU."""
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or torch.float16)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.set_autocast_cache_enabled(True)


def _with_weights_on_gpu(model: TransducerModel) -> TransducerModel:
    """The model with fakes of CUDA weights, which .to cannot make of fakes."""
    # In eval mode dropout does nothing, but of tensors without memory it makes a copy.
    model.dropout = torch.nn.Identity()  # type: ignore[assignment]
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(torch.zeros_like(value, device="cuda"))
    return model
