"""What half precision does to a model's output, beside what it does to its time; what autocast has
to cast; and with `--model` what precisions cost a trained model in words (`precision_costs`).
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchaudio.functional import edit_distance

from asrkit.features import FeatureConfig, log_mel, normalize
from asrkit.files import home
from asrkit.models import (
    Checkpoint,
    load_checkpoint,
    make_model,
    presets,
)
from asrkit.models.assembly import Model
from asrkit.models.transducer import log_probs
from asrkit.runtime import op_name
from asrkit.shapes import expect, valid_mask
from asrkit.text import ErrorRate, cer, normalize_text, wer
from asrkit.transcribe.decoding import DecodeOptions, kind_of
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.suites import precision_costs
from asrkit.workbench.measure.ops import EachOp, dtype_name
from asrkit.workbench.records import Measurement

MODES = {
    "float32": torch.float32,
    "autocast": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PRESETS_MEASURED = ("tdt_ctc_110m", "parakeet_ctc_0_6b")  # of two sizes and heads; quick: the first
ROUNDED = ("features", "log-mel", "waveform")
PAIRS = [("float32", mode) for mode in MODES if mode != "float32"] + [("autocast", "bfloat16")]


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
    dtype = MODES.get(mode, torch.float64)
    if mode not in ("float32", "autocast"):
        model = copy.deepcopy(model).to(dtype)
    device = next(model.parameters()).device.type
    kind = kind_of(model)
    options = DecodeOptions(strategy=kind.strategies["fastest"])

    @torch.inference_mode()
    def read(features: Tensor, lengths: Tensor, *, decode: bool = True) -> ModelOutput:
        """Log-probabilities of features (B, T, F) of these lengths; tokens too if `decode`."""
        with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
            encoded, ends = model.encoder(features, lengths)
            frames = kind.project(model, encoded)
            scores = ctc_log_probs(model, encoded)
            tokens: list[list[int]] = []
            if decode:
                tokens = kind.decode(model, frames, ends, options).tokens()
            return ModelOutput(scores, ends, tokens)

    return read


def ctc_log_probs(model: Model, encoded: Tensor) -> Tensor:
    """Log-probs (B, T, V) of the model's CTC head; (B, T, 0) where it has none."""
    head = kind_of(model).ctc_head(model)
    if head is None:
        return encoded.new_empty((*encoded.shape[:2], 0))
    return log_probs(head(encoded))


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far one output is from another, over the frames of speech."""

    log_prob_max: float  # nats, of any token in any frame
    log_prob_mean: float  # nats
    # the error over what tells frames apart: both root mean squares of a token's log-probs
    noise: float
    kl: float  # nats a frame, from the exact distribution to the other
    flips: float  # share of frames whose best token changed
    token_errors: float  # edits of the greedy tokens over their number in the exact


def deviation(exact: ModelOutput, other: ModelOutput) -> Deviation:
    """The Deviation of `other` from `exact`, computed in float64."""
    valid = valid_mask(exact.lengths, exact.log_probs.shape[1])
    p = exact.log_probs[valid].double()  # (N, V)
    q = other.log_probs[valid].double()
    error = (p - q).abs()
    spread = p - p.mean(0)
    # log-probs sum to one only in their own precision
    p = p.log_softmax(-1)
    q = q.log_softmax(-1)
    edits = sum(edit_distance(a, b) for a, b in zip(exact.tokens, other.tokens, strict=True))
    return Deviation(
        log_prob_max=error.max().item(),
        log_prob_mean=error.mean().item(),
        noise=(error.norm() / spread.norm()).item(),
        kl=(p.exp() * (p - q)).sum(-1).mean().item(),
        flips=(p.argmax(-1) != q.argmax(-1)).double().mean().item(),
        token_errors=edits / max(1, sum(map(len, exact.tokens))),
    )


def rounded_features(
    waveforms: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    *,
    where: str,
    config: FeatureConfig | None = None,
) -> Tensor:
    """Log-mel features (B, T, F), float32, with one tensor on the way rounded.

    Args:
        waveforms: (B, S).
        lengths: (B,) samples.
        dtype: that the tensor is rounded to.
        where: one of ROUNDED. "features": the result, as at the door of a model in half precision.
            "log-mel": before the normalisation, which is then computed in `dtype` too. "waveform":
            the samples.
        config: of the features; None: the defaults.
    """
    expect(where in ROUNDED, "where", f"one of {', '.join(ROUNDED)}", repr(where))
    config = config or FeatureConfig()
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


def unheard_digits(
    checkpoint: Checkpoint, *, device: str = "cpu", most: int | None = None
) -> Speech:
    """The digit strings of the test split of asrkit's synthetic speech, in voices that no training
    set has, as one batch.

    Args:
        checkpoint: of the trained model.
        device: of the batch.
        most: utterances at most; None: all.
    """
    from asrkit.data import Utterances, corpora

    cuts = corpora.load(["spoken_commands"], kinds=["digits"])["test"]
    test = Utterances.load(cuts, progress=False)
    batch = test.batch(range(len(test))[:most], checkpoint.tokenizer)
    texts = [normalize_text(text) for text in batch.texts]
    return Speech(checkpoint, batch.waveforms.to(device), batch.sample_lengths.to(device), texts)


def random_model(preset: str, *, device: str = "cpu", seed: int = 0) -> Model:
    """A model with random weights, in eval mode; global random state is left as it was.

    Args:
        preset: a name in asrkit.models.presets.PRESETS.
        device: of the model.
        seed: of the weights.
    """
    known = ", ".join(presets.PRESETS)
    expect(preset in presets.PRESETS, "preset", f"one of {known}", repr(preset))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_model(presets.PRESETS[preset]()).eval().to(device)


class Cast(NamedTuple):
    """One cast of an operand."""

    operand: str  # "weight" or "activation"
    source: str  # dtype
    target: str  # dtype
    bytes: int  # read and written


def autocast_casts(
    make: Callable[[], nn.Module], *shape: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> list[Cast]:
    """Casts of one call of an encoder under the autocast of a device that need not be there:
    tensors have no memory.

    CPU and CUDA have different lists of ops that autocast computes in half precision and in
    float32. Attention is one op here: which kernel takes it, the GPU decides.

    Args:
        make: returns a module of (features, lengths).
        shape: (B, T, F) of the features.
        device: "cpu" or "cuda".
        dtype: of the autocast region.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = make().eval()
        weights = {name: value.to(device) for name, value in module.state_dict().items()}
        features = torch.randn(shape).to(device)
        lengths = torch.full(shape[:1], shape[1]).to(device)
        watch = _Casts({weight.untyped_storage()._cdata for weight in weights.values()})
        # in inference mode attention arrives whole
        with torch.inference_mode(), _region(device, dtype), watch:
            functional_call(module, weights, (features, lengths))
    return watch.casts


@contextmanager
def _region(device: str, dtype: torch.dtype) -> Iterator[None]:
    """What torch.autocast does, which opens no region for a device that is not there."""
    enabled = torch.is_autocast_enabled(device)
    dtype_before = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype_before)


class _Casts(EachOp):
    """Writes down each cast; `weights` are the storages of the model's weights."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights = weights
        self.casts: list[Cast] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_name(func) == "scaled_dot_product_attention":
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` with `args` and `kwargs`, and list it if it is a cast."""
        result = func(*args, **kwargs)
        if op_name(func) != "_to_copy" or not result.is_floating_point():
            return result
        source = args[0]
        if source.dtype != result.dtype:
            operand = "activation"
            if source.untyped_storage()._cdata in self.weights:
                operand = "weight"
            self.casts.append(
                Cast(
                    operand,
                    dtype_name(source.dtype),
                    dtype_name(result.dtype),
                    source.nbytes + result.nbytes,
                )
            )
        return result


def suite(
    device: str,
    quick: bool,
    *,
    model: Path | None = None,
    kinds: Sequence[str] | None = None,
) -> Iterator[Case]:
    """Yield the trained model of notebook 00, where there is one, and published sizes with random
    weights; or instead of them what precisions cost a trained model of the caller.

    Args:
        device: "cpu" or "cuda".
        quick: one small size and few utterances.
        model: a checkpoint whose words are counted, on a CPU.
        kinds: of the speech that `model` hears, as `asrkit train --kinds` names them; None for all.

    Raises:
        ValueError: `kinds` without a model, or a model and a GPU.
    """
    expect(model is not None or kinds is None, "kinds", "--model beside it", "none")
    if model is not None:
        expect(device == "cpu", "device", "cpu with --model", device)
        yield precision_costs.case(load_checkpoint(model), kinds, quick)
        return
    path = home(make=False) / "demo" / "model.safetensors"
    if path.exists():
        checkpoint = load_checkpoint(path, device=device)
        most = None
        if quick:
            most = 32
        yield _trained(unheard_digits(checkpoint, device=device, most=most))
    else:
        logging.getLogger(__name__).warning(
            "No trained model: run notebook 00 first to have error rates too."
        )
    presets_measured: Sequence[str] = PRESETS_MEASURED
    shape = (2, 1600, 80)
    if quick:
        presets_measured = PRESETS_MEASURED[:1]
        shape = (2, 200, 80)
    for preset in presets_measured:
        yield _random(preset, device, shape)


def _trained(speech: Speech) -> Case:
    """Times, deviations and error rates of a trained model, and of rounded features."""
    inputs = speech.features()
    config = FeatureConfig(**speech.checkpoint.features)
    made = _case("precision-demo", speech.checkpoint.model, inputs, "trained")
    deviations = made.more

    def rates(output: ModelOutput, impl: str, dtype: str) -> Iterator[Measurement]:
        for metric, rate in zip(("wer", "cer"), speech.rates(output), strict=True):
            spread = {"low": rate.low, "high": rate.high, "units": rate.units}
            params = made.params | {"dtype": dtype} | spread
            yield Measurement(made.what, metric, "fraction", rate.rate, impl=impl, params=params)

    def more() -> Iterator[Measurement]:
        yield from deviations()
        for mode, dtype in MODES.items():
            output = reader(speech.checkpoint.model, mode)(*inputs)
            yield from rates(output, mode, dtype_name(dtype))
        read = reader(speech.checkpoint.model, "float32")
        for where in ROUNDED:
            rounded = rounded_features(
                speech.waveforms, speech.lengths, torch.bfloat16, where=where, config=config
            )
            output = read(rounded, inputs[1])
            yield from rates(output, f"{where} in bfloat16", "float32")

    return replace(made, more=more)


def _random(preset: str, device: str, shape: tuple[int, int, int]) -> Case:
    """Times and deviations of a preset with random weights."""
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    lengths = torch.linspace(shape[1], shape[1] // 2, shape[0]).long().to(device)
    model = random_model(preset, device=device)
    return _case(f"precision-{preset}", model, (features, lengths), "random")


def _case(what: str, model: Model, inputs: tuple[Tensor, Tensor], weights: str) -> Case:
    """Time of each mode, features in, log-probs out; beside it each mode's Deviation from float64.

    Decoding is not timed: how long it takes depends on the tokens, and those of random weights are
    arbitrary.

    Args:
        what: the name of the case.
        model: float32.
        inputs: features and lengths.
        weights: "random" or "trained".
    """
    read = {mode: reader(model, mode) for mode in MODES}
    params = {
        "shape": list(inputs[0].shape),
        "device": str(inputs[0].device),
        "threads": torch.get_num_threads(),
        "weights": weights,
    }

    def deviations() -> Iterator[Measurement]:
        exact = reader(model, "float64")(*inputs)
        for mode, read_mode in read.items():
            of_mode = params | {"dtype": dtype_name(MODES[mode])}
            for metric, value in asdict(deviation(exact, read_mode(*inputs))).items():
                unit = "nats" if metric.startswith(("log", "kl")) else "fraction"
                yield Measurement(what, metric, unit, value, impl=mode, params=of_mode)

    arm_params = {mode: {"dtype": dtype_name(MODES[mode]), "tolerance": 0.1} for mode in MODES}
    return Case(
        what=what,
        params=params,
        arms={mode: partial(_log_probs, one, inputs) for mode, one in read.items()},
        ratios=PAIRS,
        arm_params=arm_params,
        more=deviations,
    )


def _log_probs(read: Callable[..., ModelOutput], inputs: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    return (read(*inputs, decode=False).log_probs,)


SUITE = Suite(
    name="precision",
    cases=suite,
    options=("model", "kinds"),
)
