"""What half precision does to a model's output; what autocast has to cast; and the words that
bfloat16 and int8 cost a trained model, which is what the suite measures.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from asrkit.cpu import has_int8
from asrkit.features import FeatureConfig, log_mel, normalize
from asrkit.files import home
from asrkit.gpu_waits import op_name
from asrkit.models import Checkpoint, FastConformer, load_checkpoint
from asrkit.models.presets import Model
from asrkit.models.transducer import log_probs
from asrkit.shapes import expect, valid_mask
from asrkit.text import ErrorRate, cer, normalize_text, wer
from asrkit.transcribe.decoding import DecodeOptions, kind_of
from asrkit.transcribe.options import PipelineConfig
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.publishing import error_rate
from asrkit.workbench.measure.ops import Listener, Op
from asrkit.workbench.records import Measurement

MODES = {
    "float32": torch.float32,
    "autocast": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ROUNDED = ("features", "log-mel", "waveform")
COST = "precision-cost"
JOBS = 3000  # utterances of the test set and of the development set, a third of each kind
RESAMPLES = 1000


class ModelOutput(NamedTuple):
    """What a model makes of a batch."""

    log_probs: Tensor  # (B, T, V) of its CTC head; (B, T, 0) where it has none
    lengths: Tensor  # (B,)
    tokens: list[list[int]]  # greedy, by the model's own decoder


def reader(model: Model, mode: str) -> Callable[..., ModelOutput]:
    """A function `read(features, lengths, decode=True)` that runs the model in one precision.

    It takes float32 features (B, T, F) and lengths (B,), and returns a `ModelOutput`, without
    tokens unless `decode`.

    Args:
        model: float32, in eval mode; it is not changed.
        mode: one of MODES, or "float64". "autocast" opens a region for each call, in bfloat16,
            decoding included; the others run a copy of the model in that dtype.
    """
    known = ", ".join(MODES)
    expect(mode in (*MODES, "float64"), "mode", f"one of {known} or float64", repr(mode))
    if mode not in ("float32", "autocast"):
        model = copy.deepcopy(model).to(getattr(torch, mode))
    device = next(model.parameters()).device.type
    kind = kind_of(model)
    head = kind.ctc_head(model)
    options = DecodeOptions(strategy=kind.strategies["fastest"])

    @torch.inference_mode()
    def read(features: Tensor, lengths: Tensor, *, decode: bool = True) -> ModelOutput:
        """Log-probabilities of features (B, T, F) of these lengths; tokens too if `decode`."""
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
    """How far one output is from another, over the frames of speech."""

    log_prob_max: float  # nats, of any token in any frame
    log_prob_mean: float  # nats


def deviation(exact: ModelOutput, other: ModelOutput) -> Deviation:
    """The Deviation of `other` from `exact`, computed in float64."""
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
    """Log-mel features (B, T, F), float32, with one tensor on the way rounded.

    Args:
        waveforms: (B, S).
        lengths: (B,) samples.
        dtype: that the tensor is rounded to.
        where: one of ROUNDED. "features": the result, as at the door of a model in half precision.
            "log-mel": before the normalisation, which is then computed in `dtype` too. "waveform":
            the samples.
        config: of the features.
    """
    expect(where in ROUNDED, "where", f"one of {', '.join(ROUNDED)}", repr(where))
    if where == "log-mel":
        plain = replace(config, normalization="none")
        bands, frames = log_mel(waveforms, lengths, config=plain)
        return normalize(bands.to(dtype), frames).float()
    if where == "waveform":
        return log_mel(waveforms.to(dtype), lengths, config=config)[0]
    return log_mel(waveforms, lengths, config=config)[0].to(dtype).float()


class Speech(NamedTuple):
    """A trained model and a batch that it was not trained on."""

    checkpoint: Checkpoint
    waveforms: Tensor  # (B, S)
    lengths: Tensor  # (B,)
    texts: list[str]  # of each utterance

    def features(self) -> tuple[Tensor, Tensor]:
        """Log-mel features (B, T, F) and lengths (B,)."""
        config = FeatureConfig(**self.checkpoint.features)
        return log_mel(self.waveforms, self.lengths, config=config)

    def rates(self, output: ModelOutput) -> tuple[ErrorRate, ErrorRate]:
        """Word and character error rate of the output's tokens."""
        tokenizer = self.checkpoint.tokenizer
        texts = [normalize_text(tokenizer.decode(row)) for row in output.tokens]
        return wer(self.texts, texts), cer(self.texts, texts)


def unheard_digits(checkpoint: Checkpoint, *, most: int | None = None) -> Speech:
    """The digit strings of the test split of asrkit's synthetic speech, in voices that no training
    set has, as one batch.

    Args:
        checkpoint: of the trained model.
        most: utterances at most; None: all.
    """
    from asrkit.data import Utterances, corpora

    cuts = corpora.load(["spoken_commands"], kinds=["digits"])["test"]
    test = Utterances.load(cuts, progress=False)
    batch = test.batch(range(len(test))[:most], checkpoint.tokenizer)
    texts = [normalize_text(text) for text in batch.texts]
    return Speech(checkpoint, batch.waveforms, batch.sample_lengths, texts)


def autocast_casts(make: Callable[[], nn.Module], *shape: int, device: str) -> list[Op]:
    """Casts of one call of an encoder under the autocast to bfloat16 of a device that need not be
    there: tensors have no memory.

    CPU and CUDA have different lists of ops that autocast computes in half precision and in
    float32. Attention is one op here: which kernel takes it, the GPU decides.

    Args:
        make: returns a module of (features, lengths).
        shape: (B, T, F) of the features.
        device: "cpu" or "cuda".
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device(device):
        module = make().eval()
        features = torch.randn(shape)
        lengths = torch.full(shape[:1], shape[1])
        listener = _AttentionWhole(device, module)
        # in inference mode attention arrives whole
        with torch.inference_mode(), _region(device), listener:
            module(features, lengths)
    return [op for op in listener.ops if op.kind == "cast"]


class _AttentionWhole(Listener):
    """A listener that takes attention for one op, which has no casts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_name(func) == "scaled_dot_product_attention":
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _region(device: str) -> Iterator[None]:
    """What torch.autocast does, which opens no region for a device that is not there."""
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


def suite(
    device: str,
    quick: bool,
    *,
    model: Path | None = None,
    kinds: Sequence[str] | None = None,
) -> Iterator[Case]:
    """Yield what precisions cost a trained model.

    Args:
        device: "cpu".
        quick: few utterances.
        model: the checkpoint; None for that of notebook 00, where there is one.
        kinds: of the speech that it reads, as `asrkit train --kinds` names them; None for all, and
            for the digits that the model of notebook 00 was trained on.

    Raises:
        ValueError: a GPU.
    """
    expect(device == "cpu", "device", "cpu", device)
    if model is None:
        model = home(make=False) / "demo" / "model.safetensors"
        kinds = kinds or ["digits"]
    if model.exists():
        yield Case(what=COST, measure=partial(costs, load_checkpoint(model), kinds, quick))
    else:
        logging.getLogger(__name__).warning("No trained model to measure: run notebook 00 first.")


def costs(
    checkpoint: Checkpoint, kinds: Sequence[str] | None, quick: bool
) -> Iterator[Measurement]:
    """Word error rate of a trained model in float32, bfloat16 and, where this CPU and the encoder
    have it, int8; beside the last two, what changes by them. Neither voices nor texts of four
    words and more are in the training set.

    Args:
        checkpoint: of the model, float32 on a CPU.
        kinds: of the speech; None for all.
        quick: little speech.
    """
    from asrkit.data import Utterances, corpora
    from asrkit.training import evaluate

    jobs = 60 if quick else JOBS
    sets = corpora.spoken_commands(train=0, dev=jobs, test=jobs, kinds=kinds, progress=False)
    speech = Utterances.load([*sets["test"], *sets["dev"]], progress=False)
    params = {
        "weights": "trained",
        "kinds": [*(kinds or ["all"])],
        "utterances": len(speech),
        "threads": torch.get_num_threads(),
        "case": f"{len(speech):,} utterances",
    }
    plain: list[str] = []
    for precision in precisions_of(checkpoint):
        found = evaluate(checkpoint, speech, config=PipelineConfig(precision=precision))
        yield error_rate(COST, "wer", found.errors, impl=precision, params=params)
        texts = [found.texts[id_] for id_ in speech.ids]
        if plain:
            references = [normalize_text(text) for text in speech.texts]
            yield from changes(precision, references, plain, texts, params)
        else:
            plain = texts


def precisions_of(checkpoint: Checkpoint) -> list[Any]:
    """float32, bfloat16, and int8 where this CPU has it and the encoder is a FastConformer."""
    if has_int8() and isinstance(checkpoint.model.encoder, FastConformer):
        return ["float32", "bfloat16", "int8"]
    logging.getLogger(__name__).warning(
        "int8 is left out: it needs a FastConformer, and a CPU with VNNI or AMX."
    )
    return ["float32", "bfloat16"]


def changes(
    precision: str,
    references: Sequence[str],
    plain: Sequence[str],
    other: Sequence[str],
    params: dict[str, Any],
) -> Iterator[Measurement]:
    """How many more word errors the texts of a precision have than those of float32, with an
    interval by a bootstrap of utterances, and how many texts differ.

    Args:
        precision: of the texts.
        references: what was said.
        plain: texts of float32.
        other: texts of the precision.
        params: of the measurements.
    """
    words = np.array([len(text.split()) for text in references])
    more = _word_errors(references, other) - _word_errors(references, plain)
    draws = np.random.default_rng(0).integers(0, len(words), (RESAMPLES, len(words)))
    rates = more[draws].sum(1) / words[draws].sum(1)
    low, high = np.quantile(rates, [0.025, 0.975]).tolist()
    spread = {"low": low, "high": high, "units": int(words.sum())}
    rate = float(more.sum() / words.sum())
    yield Measurement(
        COST, "more_word_errors", "fraction", rate, impl=precision, params=params | spread
    )
    differ = sum(a != b for a, b in zip(plain, other, strict=True)) / len(plain)
    yield Measurement(COST, "other_texts", "fraction", differ, impl=precision, params=params)


def _word_errors(references: Sequence[str], texts: Sequence[str]) -> Any:
    """Word errors of each text (N,)."""
    import jiwer  # lazily, as a bare GPU machine has none

    found = map(jiwer.process_words, references, texts)
    return np.array([one.substitutions + one.insertions + one.deletions for one in found])


SUITE = Suite(name="precision", cases=suite, cpu_only=True)
