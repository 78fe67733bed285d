"""Fast inference: `optimize` computes once what follows from the weights alone."""

from typing import Any, TypeVar

from torch import nn

from asrkit.cpu import expect_int8
from asrkit.models.attention import RelativeAttention
from asrkit.models.fastconformer import FastConformer
from asrkit.models.folded import fold
from asrkit.models.fused import FeedForward, fuse
from asrkit.models.packed import pack, packs
from asrkit.models.packed_conformer import LinearLayers, pack_conformer, packs_conformer
from asrkit.models.weight_cache import WeightCache
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)


def optimize(
    model: M,
    *,
    feed_forward: FeedForward = "as_it_is",
    linear_layers: LinearLayers = "as_it_is",
) -> M:
    """Make inference of `model` faster; what it computes is the same but for rounding.

    On a CPU batch norms are folded into convolutions, the branches of a Jasper become one product,
    and linear layers and convolutions are packed for oneDNN; in float32 and bfloat16 a
    FastConformer becomes one whose activations, norms and residuals are parts of its products
    (`asrkit.models.packed_conformer`). On CUDA a FastConformer becomes a fused one
    (`asrkit.models.fused`), and other encoders are folded. What follows from weights alone, such as
    projected positions, is cached. Afterwards the model is for inference on this device, under
    no_grad, and no weight may change: to train, save, move or cast it, optimize another copy
    instead.

    Args:
        model: A model or an encoder in eval mode, its weights loaded, moved and cast. It is
            changed in place; a bare FastConformer is not to be used afterwards, but for what is
            returned.
        feed_forward: "float8", for a FastConformer in bfloat16 on CUDA, computes its feed-forwards
            in 8-bit floats, which is another arithmetic: measure what your model loses by it.
        linear_layers: "int8", for a FastConformer in float32 or bfloat16 on a CPU with VNNI or AMX,
            computes the linear layers of its blocks in int8 (`asrkit.models.int8`), which is
            another arithmetic too. All else stays in the model's dtype: bfloat16 is the faster one
            where the CPU has it.

    Returns:
        The model; of a bare FastConformer, the fused encoder with its weights.

    Raises:
        ValueError: The model is in training mode, or `feed_forward` or `linear_layers` does not go
            with it or with this CPU.
    """
    expect(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    expect(not model.training, "model", "eval mode", "training mode", "Call model.eval() first.")
    if linear_layers != "as_it_is":
        _check_int8(model, linear_layers)
    if any(weight.is_cuda for weight in model.parameters()):
        if isinstance(model, FastConformer):
            return fuse(model, feed_forward=feed_forward)  # type: ignore[return-value]
        model_with_encoder: Any = model
        if isinstance(getattr(model_with_encoder, "encoder", None), FastConformer):
            encoder = model_with_encoder.encoder
            model_with_encoder.encoder = fuse(encoder, feed_forward=feed_forward)
            return model
    plain = feed_forward == "as_it_is"
    expect(plain, "feed_forward", "'as_it_is' but for a FastConformer on CUDA", repr(feed_forward))
    fold(model)
    if packs(model):
        model = _with_packed_conformer(model, linear_layers)
    for part in model.modules():
        if isinstance(part, RelativeAttention):
            part.position_cache = WeightCache()
    if packs(model):
        pack(model)
    return model


def _check_int8(model: Any, linear_layers: str) -> None:
    """ValueError unless linear layers of `model` can be computed in int8 here."""
    known = "'as_it_is' or 'int8'"
    expect(linear_layers == "int8", "linear_layers", known, repr(linear_layers))
    expect_int8()
    encoder = getattr(model, "encoder", model)
    wanted = "'as_it_is' but for a FastConformer in float32 or bfloat16 on a CPU"
    expect(packs_conformer(encoder), "linear_layers", wanted, "'int8'")


def _with_packed_conformer(model: Any, linear_layers: LinearLayers) -> Any:
    """The model with a packed FastConformer where it has, or is, one that can be packed."""
    if packs_conformer(model):
        return pack_conformer(model, linear_layers=linear_layers)
    encoder = getattr(model, "encoder", None)
    if encoder is not None and packs_conformer(encoder):
        model.encoder = pack_conformer(encoder, linear_layers=linear_layers)
    return model
