"""Errors of half precision in a model's output, and the casts of autocast."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.features import FeatureConfig, log_mel, normalize
from asrkit.gpu_waits import op_name
from asrkit.models import Checkpoint
from asrkit.models.ctc import log_probs
from asrkit.models.presets import Model
from asrkit.shapes import expect_choice, valid_mask
from asrkit.text import ErrorRate, cer, normalize_text, wer
from asrkit.transcribe.decoding import DecodeOptions, kind_of
from asrkit.workbench.measure.ops import Listener, Op

MODES = ("float32", "autocast", "bfloat16", "float16")
ROUNDED = ("features", "log-mel", "waveform")


class ModelOutput(NamedTuple):
    """The outputs of a model for a batch."""

    log_probs: Tensor  # (B, T, V) of the CTC head; (B, T, 0) without one
    lengths: Tensor  # (B,)
    tokens: list[list[int]]  # greedy


def reader(model: Model, mode: str) -> Callable[..., ModelOutput]:
    """A function `read(features, lengths, decode=True)` that runs the model in one precision.

    It takes float32 features (B, T, F) and lengths (B,), and returns a `ModelOutput`; with
    decode=False the tokens are empty.

    Args:
        model: model in float32 and in eval mode; it is not changed.
        mode: one of MODES, or "float64". "autocast" runs each call, decoding included, under
            autocast to bfloat16; the others run a copy of the model in that dtype.
    """
    expect_choice("mode", mode, [*MODES, "float64"])
    if mode not in ("float32", "autocast"):
        model = copy.deepcopy(model).to(getattr(torch, mode))
    device = next(model.parameters()).device.type
    kind = kind_of(model)
    head = kind.ctc_head(model)
    options = DecodeOptions(strategy=kind.strategies["fastest"])

    @torch.inference_mode()
    def read(features: Tensor, lengths: Tensor, *, decode: bool = True) -> ModelOutput:
        """The outputs for features (B, T, F); tokens only if `decode`."""
        with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
            encoded, ends = model.encoder(features, lengths)
            frames = kind.project(model, encoded)
            scores = encoded[..., :0] if head is None else log_probs(head(encoded))
            tokens: list[list[int]] = []
            if decode:
                tokens = kind.decode(model, frames, ends, options).tokens()
            return ModelOutput(scores, ends, tokens)

    return read


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Distance of two outputs, over the valid frames."""

    log_prob_max: float  # nats, largest of any token in any frame
    log_prob_mean: float  # nats


def deviation(exact: ModelOutput, other: ModelOutput) -> Deviation:
    """The deviation of `other` from `exact`, computed in float64."""
    valid = valid_mask(exact.lengths, exact.log_probs.shape[1])
    error = (exact.log_probs[valid].double() - other.log_probs[valid].double()).abs()
    return Deviation(log_prob_max=error.max().item(), log_prob_mean=error.mean().item())


def rounded_features(
    waveforms: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    *,
    where: str,
    config: FeatureConfig,
) -> Tensor:
    """Log-mel features (B, T, F), float32, with one tensor of their computation rounded.

    Args:
        waveforms: (B, S).
        lengths: (B,) samples.
        dtype: dtype that the tensor is rounded to.
        where: one of ROUNDED. "features" rounds the result, as at the input of a model in half
            precision; "log-mel" rounds before the normalisation, which is then computed in `dtype`
            too; "waveform" rounds the samples.
        config: settings of the features.
    """
    expect_choice("where", where, ROUNDED)
    if where == "log-mel":
        plain = replace(config, normalization="none")
        bands, frames = log_mel(waveforms, lengths, config=plain)
        return normalize(bands.to(dtype), frames).float()
    if where == "waveform":
        return log_mel(waveforms.to(dtype), lengths, config=config)[0]
    return log_mel(waveforms, lengths, config=config)[0].to(dtype).float()


class Speech(NamedTuple):
    """A trained model, and a batch of speech that is not in its training set."""

    checkpoint: Checkpoint
    waveforms: Tensor  # (B, S)
    lengths: Tensor  # (B,)
    texts: list[str]  # reference of each utterance

    def features(self) -> tuple[Tensor, Tensor]:
        """Log-mel features (B, T, F) and lengths (B,)."""
        config = FeatureConfig(**self.checkpoint.features)
        return log_mel(self.waveforms, self.lengths, config=config)

    def rates(self, output: ModelOutput) -> tuple[ErrorRate, ErrorRate]:
        """Word and character error rates of the output's tokens."""
        tokenizer = self.checkpoint.tokenizer
        texts = [normalize_text(tokenizer.decode(row)) for row in output.tokens]
        return wer(self.texts, texts), cer(self.texts, texts)


def held_out_digits(checkpoint: Checkpoint, *, most: int | None = None) -> Speech:
    """One batch of digit strings: the test split of asrkit's synthetic speech, in voices that no
    training set has.

    Args:
        checkpoint: checkpoint of the trained model.
        most: largest number of utterances; None: all.
    """
    from asrkit.data import Utterances, corpora

    cuts = corpora.load(["spoken_commands"], kinds=["digits"])["test"]
    test = Utterances.load(cuts, progress=False)
    batch = test.batch(range(len(test))[:most], checkpoint.tokenizer)
    texts = [normalize_text(text) for text in batch.texts]
    return Speech(checkpoint, batch.waveforms, batch.sample_lengths, texts)


def autocast_casts(make: Callable[[], nn.Module], *shape: int, device: str) -> list[Op]:
    """Casts of one call of an encoder under autocast to bfloat16, without memory for the tensors.

    The device need not be present. CPU and CUDA have different lists of ops that autocast computes
    in half precision and in float32. Attention counts as one op, because its kernel depends on the
    GPU.

    Args:
        make: returns a module that takes features and lengths.
        shape: (B, T, F) of the features.
        device: "cpu" or "cuda".
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device(device):
        module = make().eval()
        features = torch.randn(shape)
        lengths = torch.full(shape[:1], shape[1])
        listener = _AttentionWhole(device, module)
        # in inference mode attention is dispatched as one op
        with torch.inference_mode(), _region(device), listener:
            module(features, lengths)
    return [op for op in listener.ops if op.kind == "cast"]


class _AttentionWhole(Listener):
    """A listener that counts attention as one op without casts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_name(func) == "scaled_dot_product_attention":
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _region(device: str) -> Iterator[None]:
    """torch.autocast to bfloat16, also for a device that is not present."""
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def cast_and_product(
    device: str, rows: int, width: int, inner: int
) -> dict[str, Callable[[], object]]:
    """Arms "cast", which casts the factors of a product to bfloat16, and "product" in bfloat16.

    Args:
        device: device of the tensors.
        rows: number of rows of the input (rows, width).
        width: number of columns of the input.
        inner: number of rows of the weight (inner, width).
    """
    parts = [torch.randn(size, device=device) for size in ((rows, width), (inner, width), (inner,))]
    half = [part.to(torch.bfloat16) for part in parts]

    def cast() -> list[Tensor]:
        return [part.to(torch.bfloat16) for part in parts]

    return {"cast": cast, "product": partial(F.linear, *half)}
