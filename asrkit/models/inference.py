"""One door to fast inference: what can be worked out of the weights once is, for the device that
the model is on.
"""

from typing import Any, TypeVar

from torch import nn

from asrkit.models.fastconformer import FastConformer, RelativeAttention
from asrkit.models.folded import fold
from asrkit.models.fused import FeedForward, fuse
from asrkit.models.kept import Kept
from asrkit.models.packed import pack, packs
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)


def optimize(model: M, *, feed_forward: FeedForward = "as_it_is") -> M:
    """`model`, which says the same but for rounding, sooner: after its weights are loaded, moved
    and cast, and in eval mode.

    On a CPU it is changed itself: batch norms are folded into convolutions, linear layers are
    packed where oneDNN has products of their dtype. On CUDA its FastConformer becomes a fused one
    (asrkit.models.fused); of an encoder given alone, that is what is returned. Afterwards the model
    is for inference where it is, under no_grad, and no weight may change: what is made of weights
    alone, such as projected positions, is kept. Training is refused, and saving or moving packed
    layers; optimize a new model instead. ValueError in training mode. feed_forward="float8", for a
    FastConformer in bfloat16 on CUDA, also computes its feed-forwards in 8-bit floats, which is
    another arithmetic: what that loses is to be measured with the model in question.
    """
    expect(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    expect(not model.training, "model", "eval mode", "training mode", "Call model.eval() first.")
    made: Any = model
    on_cuda = any(weight.is_cuda for weight in model.parameters())
    if on_cuda and isinstance(model, FastConformer):
        return fuse(model, feed_forward=feed_forward)  # type: ignore[return-value]
    if on_cuda and isinstance(getattr(model, "encoder", None), FastConformer):
        made.encoder = fuse(made.encoder, feed_forward=feed_forward)
        return made
    plain = feed_forward == "as_it_is"
    expect(plain, "feed_forward", "'as_it_is' but for a FastConformer on CUDA", repr(feed_forward))
    fold(model)
    for part in model.modules():
        if isinstance(part, RelativeAttention):
            part.kept = Kept()
    return pack(model) if packs(model) else model
