"""What half precision does to what a model says, beside what it does to its time; and what autocast
has to cast.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchaudio.functional import edit_distance

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.features import FeatureConfig, log_mel, normalize
from asrkit.files import home
from asrkit.models import (
    Checkpoint,
    CTCModel,
    TransducerModel,
    load_checkpoint,
    make_model,
    presets,
)
from asrkit.runtime import op_name
from asrkit.shapes import expect, valid_mask
from asrkit.text import ErrorRate, cer, normalize_text, wer
from asrkit.workbench.bench.cases import Case, Suite, dtype_name
from asrkit.workbench.profiling.ops import EachOp
from asrkit.workbench.records import Measurement

MODES = {
    "float32": torch.float32,
    "autocast": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PRESETS_MEASURED = (
    "tdt_ctc_110m",
    "parakeet_ctc_0_6b",
)  # of sizes and heads that differ; quick: the first
ROUNDED = ("features", "log-mel", "waveform")
PAIRS = [("float32", mode) for mode in MODES if mode != "float32"] + [("autocast", "bfloat16")]
Model = TransducerModel | CTCModel


class Said(NamedTuple):
    """What a model made of a batch: log-probs (B, T, V) of its CTC head, lengths (B,), and greedy
    tokens.
    """

    log_probs: Tensor
    lengths: Tensor
    tokens: list[list[int]]


def reader(model: Model, mode: str) -> Callable[..., Said]:
    """`read(features, lengths, decode=True)` on float32 (B, T, F) and (B,): a float32 model in one
    of MODES, or in "float64".

    "autocast" opens a region for each call, in bfloat16, decoding included. The others run a copy
    of the model in that dtype. Decoding is the transducer's if it is one; without it no tokens are
    said.
    """
    expect(mode in (*MODES, "float64"), "mode", f"one of {', '.join(MODES)} or float64", repr(mode))
    dtype = MODES.get(mode, torch.float64)
    if mode not in ("float32", "autocast"):
        model = copy.deepcopy(model).to(dtype)
    device = next(model.parameters()).device.type

    @torch.inference_mode()
    def read(features: Tensor, lengths: Tensor, *, decode: bool = True) -> Said:
        with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
            if isinstance(model, CTCModel):
                log_probs, lengths = model(features, lengths)
                return Said(
                    log_probs, lengths, ctc_greedy(log_probs, lengths).tokens() if decode else []
                )
            encoded, lengths, log_probs = model.encode(features, lengths)
            return Said(
                log_probs,
                lengths,
                transducer_greedy(model, encoded, lengths).tokens() if decode else [],
            )

    return read


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far one Said is from another, over the frames of speech."""

    log_prob_max: float  # nats, of any token in any frame
    log_prob_mean: float  # nats
    # the error over what tells frames apart: both root mean squares of a token's log-probs
    noise: float
    kl: float  # nats a frame, from the exact distribution to the other
    flips: float  # share of frames whose best token changed
    token_errors: float  # edits of the greedy tokens over their number in the exact


def deviation(exact: Said, other: Said) -> Deviation:
    """The Deviation of `other` from `exact`, computed in float64."""
    valid = valid_mask(exact.lengths, exact.log_probs.shape[1])
    p, q = (said.log_probs[valid].double() for said in (exact, other))  # (N, V)
    off, apart = (p - q).abs(), p - p.mean(0)
    p, q = p.log_softmax(-1), q.log_softmax(-1)  # their sums are one only in their own precision
    edits = sum(edit_distance(a, b) for a, b in zip(exact.tokens, other.tokens, strict=True))
    return Deviation(
        log_prob_max=off.max().item(),
        log_prob_mean=off.mean().item(),
        noise=(off.norm() / apart.norm()).item(),
        kl=(p.exp() * (p - q)).sum(-1).mean().item(),
        flips=(p.argmax(-1) != q.argmax(-1)).double().mean().item(),
        token_errors=edits / max(1, sum(map(len, exact.tokens))),
    )


def gaps(said: Said) -> Tensor:
    """Nats between the best token and the second, (N,) over the frames of speech: an error below
    half of it flips nothing.
    """
    best = said.log_probs[valid_mask(said.lengths, said.log_probs.shape[1])].topk(2).values
    return best[:, 0] - best[:, 1]


def rounded_features(
    waveforms: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    *,
    where: str,
    config: FeatureConfig | None = None,
) -> Tensor:
    """Log-mel features (B, T, F), float32, with one tensor on the way rounded to `dtype`: one of
    ROUNDED.

    "features": the result, as at the door of a model in half precision. "log-mel": before the
    normalisation, which is then computed in `dtype` too. "waveform": the samples.
    """
    expect(where in ROUNDED, "where", f"one of {', '.join(ROUNDED)}", repr(where))
    config = config or FeatureConfig()
    if where == "log-mel":
        bands, frames = log_mel(
            waveforms, lengths, config=FeatureConfig(**asdict(config) | {"normalization": "none"})
        )
        return normalize(bands.to(dtype), frames).float()
    if where == "waveform":
        return log_mel(waveforms.to(dtype), lengths, config=config)[0]
    return log_mel(waveforms, lengths, config=config)[0].to(dtype).float()


class Speech(NamedTuple):
    """A trained model and a batch that it has not heard: waveforms (B, S), lengths (B,), what is
    said.
    """

    checkpoint: Checkpoint
    waveforms: Tensor
    lengths: Tensor
    texts: list[str]

    def features(self) -> tuple[Tensor, Tensor]:
        """Log-mel features (B, T, F) and lengths (B,)."""
        return log_mel(
            self.waveforms, self.lengths, config=FeatureConfig(**self.checkpoint.features)
        )

    def rates(self, said: Said) -> tuple[ErrorRate, ErrorRate]:
        """Word and character error rate."""
        tokenizer = self.checkpoint.tokenizer
        heard = [normalize_text(tokenizer.decode(row)) for row in said.tokens]
        return wer(self.texts, heard), cer(self.texts, heard)


def unheard_digits(
    checkpoint: Checkpoint, *, device: str = "cpu", most: int | None = None
) -> Speech:
    """The digit strings of the test split of asrkit's synthetic speech, in voices that no training
    set has, as one batch.
    """
    from asrkit.data import Utterances, corpora

    test = Utterances.load(
        corpora.load(["spoken_commands"], kinds=["digits"])["test"], progress=False
    )
    batch = test.batch(range(len(test))[:most], checkpoint.tokenizer)
    texts = [normalize_text(text) for text in batch.texts]
    return Speech(checkpoint, batch.waveforms.to(device), batch.sample_lengths.to(device), texts)


def balanced(model: Model, features: Tensor, lengths: Tensor) -> Model:
    """The same model with its CTC head's bias set so that over this batch no token is favoured.

    A deep encoder of random weights gives nearly the same frame whatever it hears, and its head the
    same token: nothing would ever flip. Balanced, what little differs between frames decides, and a
    rounding error nearly as large flips most of them. Neither says anything about a trained model's
    tokens.
    """
    head = model.output if isinstance(model, CTCModel) else model.ctc_head
    expect(isinstance(head, nn.Linear), "model", "one with a CTC head", type(model).__name__)
    with torch.inference_mode():
        said = reader(model, "float32")(features, lengths)
        mean = said.log_probs[valid_mask(said.lengths, said.log_probs.shape[1])].mean(0)
    with torch.no_grad():
        head.bias -= mean  # type: ignore[union-attr]
    return model


def random_model(preset: str, *, device: str = "cpu", seed: int = 0) -> Model:
    """A model of asrkit.models.presets, by name, with random weights; in eval mode, global random
    state left as it was.
    """
    expect(
        preset in presets.PRESETS, "preset", f"one of {', '.join(presets.PRESETS)}", repr(preset)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_model(presets.PRESETS[preset]()).eval().to(device)


class Cast(NamedTuple):
    """One cast: of a weight, or else an activation; from and to which dtype; bytes read and
    written.
    """

    operand: str
    source: str
    target: str
    bytes: int


def autocast_casts(
    make: Callable[[], nn.Module], *shape: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> list[Cast]:
    """Casts of one call of an encoder under the autocast of `device`, which need not be there:
    tensors without memory.

    make: returns a module of (features, lengths); shape: (B, T, F). CPU and CUDA have different
    lists of ops that autocast computes in half precision and in float32. Attention is one op here:
    which kernel takes it, the GPU decides.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = make().eval()
        held = {name: value.to(device) for name, value in module.state_dict().items()}
        features, lengths = (
            torch.randn(shape).to(device),
            torch.full(shape[:1], shape[1]).to(device),
        )
        watch = _Casts({weight.untyped_storage()._cdata for weight in held.values()})
        with (
            torch.inference_mode(),
            _region(device, dtype),
            watch,
        ):  # in inference mode attention arrives whole
            functional_call(module, held, (features, lengths))
    return watch.casts


@contextmanager
def _region(device: str, dtype: torch.dtype) -> Iterator[None]:
    """What torch.autocast does, which opens no region for a device that is not there."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


class _Casts(EachOp):
    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights, self.casts = weights, list[Cast]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_name(func) == "scaled_dot_product_attention":
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if (
            op_name(func) == "_to_copy"
            and result.is_floating_point()
            and args[0].dtype != result.dtype
        ):
            operand = "weight" if args[0].untyped_storage()._cdata in self.weights else "activation"
            source = dtype_name(args[0].dtype)
            target = dtype_name(result.dtype)
            self.casts.append(Cast(operand, source, target, args[0].nbytes + result.nbytes))
        return result


def suite(device: str, quick: bool) -> Iterator[Case]:
    """The trained model of notebook 00, where it is, and published sizes with random weights."""
    if (path := home() / "demo" / "model.safetensors").exists():
        yield _trained(
            unheard_digits(
                load_checkpoint(path, device=device), device=device, most=32 if quick else None
            )
        )
    else:
        logging.getLogger(__name__).warning(
            "No trained model: run notebook 00 first to have error rates too."
        )
    for preset in PRESETS_MEASURED[: 1 if quick else None]:
        yield _random(preset, device, (2, 200 if quick else 1600, 80))


def _trained(speech: Speech) -> Case:
    given, config = speech.features(), FeatureConfig(**speech.checkpoint.features)

    def rates(said: Said, told: dict[str, Any]) -> Iterator[Measurement]:
        for metric, rate in zip(("wer", "cer"), speech.rates(said), strict=True):
            params = told["params"] | {"low": rate.low, "high": rate.high, "units": rate.units}
            yield Measurement(
                "precision-demo", metric, "fraction", rate.rate, **told | {"params": params}
            )

    def features(params: dict[str, Any]) -> Iterator[Measurement]:
        read = reader(speech.checkpoint.model, "float32")
        for where in ROUNDED:
            rounded = rounded_features(
                speech.waveforms, speech.lengths, torch.bfloat16, where=where, config=config
            )
            told: dict[str, Any] = {
                "impl": f"{where} in bfloat16",
                "params": params | {"dtype": "float32"},
            }
            off = (rounded - given[0]).norm() / given[0].norm()
            yield Measurement("precision-demo", "feature_error", "fraction", off.item(), **told)
            yield from rates(read(rounded, given[1]), told)

    return _case(
        "precision-demo", speech.checkpoint.model, given, {"weights": "trained"}, rates, features
    )


def _random(preset: str, device: str, shape: tuple[int, int, int]) -> Case:
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    lengths = torch.linspace(shape[1], shape[1] // 2, shape[0]).long().to(device)
    model = balanced(random_model(preset, device=device), features, lengths)
    return _case(
        f"precision-{preset}", model, (features, lengths), {"weights": "random, head balanced"}
    )


def _nothing(*_: Any) -> Iterator[Measurement]:
    return iter(())


def _case(
    what: str,
    model: Model,
    given: tuple[Tensor, Tensor],
    params: dict[str, Any],
    rates: Callable[..., Iterator[Measurement]] = _nothing,
    rest: Callable[..., Iterator[Measurement]] = _nothing,
) -> Case:
    """Time of each mode, features in, log-probs out; `more` has each mode's Deviation from float64,
    and what the caller adds.

    Decoding is not timed: how long it takes depends on what is said, and random weights say
    anything.
    """
    read = {mode: reader(model, mode) for mode in MODES}
    params = {
        "shape": list(given[0].shape),
        "dtype": "float32",
        "device": str(given[0].device),
        **params,
    }

    def more() -> Iterator[Measurement]:
        exact = reader(model, "float64")(*given)
        distinct = len({token for row in exact.tokens for token in row})
        told = params | {
            "gap_median": gaps(exact).median().item(),
            "tokens": sum(map(len, exact.tokens)),
            "distinct": distinct,
        }
        for mode, one in read.items():
            said = one(*given)
            of_mode: dict[str, Any] = {
                "impl": mode,
                "params": told | {"dtype": _name(mode), "threads": torch.get_num_threads()},
            }
            for metric, value in asdict(deviation(exact, said)).items():
                unit = "nats" if metric.startswith(("log", "kl")) else "fraction"
                yield Measurement(what, metric, unit, value, **of_mode)
            yield from rates(said, of_mode)
        yield from rest(told)

    return Case(
        what=what,
        params=params,
        arms={mode: partial(_log_probs, one, given) for mode, one in read.items()},
        ratios=PAIRS,
        arm_params={mode: {"dtype": _name(mode), "tolerance": 0.1} for mode in MODES},
        more=more,
    )


def _log_probs(read: Callable[..., Said], given: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    return (read(*given, decode=False).log_probs,)


def _name(mode: str) -> str:
    return dtype_name(MODES[mode])


SUITE = Suite(name="precision", cases=suite)
