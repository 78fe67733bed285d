"""What a turn of windowed looping asks of a GPU, counted on tensors of that device which have no
memory: no GPU is needed.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asrkit.decoders.states import map_state
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.steps import Confidence, GreedyModel, GreedyOptions
from asrkit.models import TransducerConfig, TransducerModel
from asrkit.workbench.profiling.launches import Launches, _Count


def turn_launches(
    config: TransducerConfig,
    *,
    fused: bool,
    window: int = GreedyOptions.window,
    confidence: Confidence = "none",
    autocast: torch.dtype | None = None,
) -> Launches:
    """Launches of one captured turn for a model of this `config`: the model's own, and those around
    it.

    They depend on its parts, not on sizes. An op of torch counts as one kernel, which products and
    an LSTM's cell are on a GPU; a kernel of Triton is one. `fused` needs triton, as it would there.
    """
    with FakeTensorMode(), torch.inference_mode():
        model, encoded = (
            _on_gpu(TransducerModel(config).eval()),
            torch.zeros(4, 16, config.joint_width, device="cuda"),
        )
        try:
            torch.set_autocast_enabled(
                "cuda", autocast is not None
            )  # torch.autocast turns itself off where there is no GPU
            torch.set_autocast_dtype("cuda", autocast or torch.float16)
            torch.set_autocast_cache_enabled(False)  # as at a capture
            greedy = GreedyModel(model, confidence, encoded.device)
            carry = map_state(torch.zeros_like, greedy.initial_carry(encoded))
            loop = GraphLoop(
                4,
                16,
                greedy,
                encoded,
                carry,
                GreedyOptions(window=window),
                unfused_because="" if fused else "as asked",
            )
            loop.load(encoded, torch.full((4,), 16, device="cuda"), carry)
            with _Count("cuda") as count:
                loop.turn(greedy)
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)
            torch.set_autocast_cache_enabled(True)
    return count.result()


def _on_gpu(model: TransducerModel) -> TransducerModel:
    """With fakes of a GPU's weights: .to cannot move fakes."""
    model.dropout = torch.nn.Identity()  # type: ignore[assignment]  # which it is here, but for a copy of tensors without memory
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(torch.zeros_like(value, device="cuda"))
    return model
