"""Fast inference: `optimize` computes once what follows from the weights alone."""

from typing import Any, TypeVar

from torch import nn

from asrkit.cpu import expect_int8
from asrkit.models.attention import RelativeAttention
from asrkit.models.fastconformer import FastConformer
from asrkit.models.folded import fold
from asrkit.models.lstm import LSTMEncoder
from asrkit.models.packed import pack, packs
from asrkit.models.packed_conformer import LinearLayers, pack_conformer, packs_conformer
from asrkit.models.weight_cache import WeightCache
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)


def optimize(model: M, *, linear_layers: LinearLayers = "as_it_is") -> M:
    """Make inference of `model` faster; what it computes is the same but for rounding.

    Batch norms are folded into convolutions. On a CPU the branches of a Jasper become one product,
    linear layers and convolutions are packed for oneDNN, projected positions are cached, and in
    float32 and bfloat16 a FastConformer becomes one whose activations, norms and residuals are
    parts of its products (`asrkit.models.packed_conformer`). On CUDA torch.compile compiles the
    encoder at its first call of each shape, unless it is an LSTM; `Recognizer` and `EncoderGraphs`
    replay it as a CUDA graph for each rounded shape. Afterwards the model is for inference on this
    device, under no_grad, and no weight may change: to train, save, move or cast it, optimize
    another copy instead.

    Args:
        model: A model or an encoder in eval mode, its weights loaded, moved and cast. It is
            changed in place; a bare FastConformer is not to be used afterwards, but for what is
            returned.
        linear_layers: "int8", for a FastConformer in float32 or bfloat16 on a CPU with VNNI or AMX,
            computes the linear layers of its blocks in int8 (`asrkit.models.int8`), which is
            another arithmetic. All else stays in the model's dtype: bfloat16 is the faster one
            where the CPU has it.

    Returns:
        The model; of a bare FastConformer on a CPU, the packed encoder with its weights.

    Raises:
        ValueError: The model is in training mode, or `linear_layers` does not go with it or with
            this CPU.
    """
    expect(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    expect(not model.training, "model", "eval mode", "training mode", "Call model.eval() first.")
    if linear_layers != "as_it_is":
        _check_int8(model, linear_layers)
    fold(model)
    if any(weight.is_cuda for weight in model.parameters()):
        encoder = getattr(model, "encoder", model)
        if not isinstance(encoder, LSTMEncoder):  # torch.compile does not follow its plan
            compile_encoder(encoder)
        return model
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


def compile_encoder(encoder: nn.Module) -> None:
    """Have torch.compile compile an encoder at its first call of each shape and dtype.

    A FastConformer is compiled block by block, since all blocks share one program; another encoder,
    whose blocks differ, as a whole. torch makes 8 programs of a function and then computes it as it
    is, with a warning only. Some sizes in three dtypes are more, so that limit is raised for the
    process, to torch's own for all programs.

    Args:
        encoder: changed in place.

    Raises:
        ValueError: it is an LSTM encoder, whose plan of a batch torch.compile does not follow.
    """
    is_lstm = isinstance(encoder, LSTMEncoder)
    expect(not is_lstm, "form", "another than 'compiled'", "an LSTM encoder")
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, config.accumulated_recompile_limit)
    parts: list[Any] = [encoder]
    if isinstance(encoder, FastConformer):
        parts = list(encoder.blocks)
    for part in parts:
        part.compile(dynamic=False)
