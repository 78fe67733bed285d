"""Claims about encoder-decoder models: what share of the time decoding takes, and what moving
layers from the decoder to the encoder is worth, at the sizes of Canary-1B and Canary-1B-Flash.

Features are noise and texts are planted (asrkit.workbench.bench.planted_attention). The claims are
recorded with the frames projected in every step, as NeMo's decoder does; the same with keys and
values kept is recorded beside, under a name of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.decoders import Hypotheses, aed_greedy
from asrkit.models import AEDConfig, presets
from asrkit.models.transducer import make_encoder
from asrkit.workbench.bench.planted_attention import (
    PlantedDecoder,
    PlantedText,
    planted_decoder,
    planted_text,
)
from asrkit.workbench.bench.studies import StudyRecords, repeats
from asrkit.workbench.measure import Timing, measure
from asrkit.workbench.measure.ops import dtype_name
from asrkit.workbench.records import Measurement

NAMES = ("deep_decoder", "shallow_decoder")
PROMPT = 9  # tokens of a prompt of Canary-1B-Flash
SUBSAMPLING = 8


class Sizes(NamedTuple):
    """Sizes of the study; the last batch and duration decide the claims."""

    deep: AEDConfig
    shallow: AEDConfig
    batches: Sequence[int]
    seconds: Sequence[float]  # of the longest utterance


def sizes_of(quick: bool) -> Sizes:
    """Those of Canary-1B and its Flash, or toy sizes."""
    if not quick:
        deep, shallow = presets.canary_1b(), presets.canary_1b_flash()
        return Sizes(deep, shallow, batches=(1, 32, 128), seconds=(10.0, 20.0))
    toy: dict[str, Any] = {"width": 120, "heads": 2, "bos": 0, "eos": 1, "pad": 2, "most": 64}
    encoder = presets.tiny_aed().encoder
    deep, shallow = (
        AEDConfig(vocab_size=33, encoder=encoder, layers=layers, **toy) for layers in (3, 1)
    )
    return Sizes(deep, shallow, batches=(1, 2), seconds=(2.0,))


class Model(NamedTuple):
    """One of the two models; the encoder is not that of the decoder's model."""

    bins: int
    decoder: PlantedDecoder
    encoder: nn.Module


def model_of(config: AEDConfig, device: str, dtype: torch.dtype) -> Model:
    """A model of these sizes; its encoder is made where it is to run, for its size.

    Args:
        config: sizes.
        device: of encoder and decoder.
        dtype: of both.
    """
    decoder = planted_decoder(
        V=config.vocab_size,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        most=config.most,
    )
    decoder.model.to(device, dtype)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        encoder = make_encoder(config.encoder).to(dtype)
    bins: Any = getattr(config.encoder, "bins", 0)
    return Model(bins, decoder, encoder.eval().requires_grad_(False))


def moved_layers(device: str, quick: bool) -> Iterator[Measurement]:
    """Shares of decoding and ratios of deep to shallow decoder, by batch and duration.

    Args:
        device: "cpu" or "cuda"; on a GPU all is in bfloat16.
        quick: toy sizes.
    """
    cuda = device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    sizes = sizes_of(quick)
    ways = {
        "recomputed": {"cross": "recomputed", "past": "states"},
        "kept": {},
    }
    configs = (sizes.deep, sizes.shallow)
    models = {
        name: model_of(config, device, dtype) for name, config in zip(NAMES, configs, strict=True)
    }
    for B, seconds in product(sizes.batches, sizes.seconds):
        arms = _arms(models, ways, B, seconds, device, dtype)
        times = measure(arms, **repeats(device, quick))
        shape = [B, round(100 * seconds / SUBSAMPLING), sizes.deep.width]
        records = StudyRecords(
            device, quick, shape=shape, seconds=seconds, dtype=dtype_name(dtype), prompt=PROMPT
        )
        yield from _claims(times, ways, records)


def _arms(
    models: Mapping[str, Model],
    ways: Mapping[str, dict[str, Any]],
    B: int,
    seconds: float,
    device: str,
    dtype: torch.dtype,
) -> dict[str, Callable[[], object]]:
    """The encoder of each model, and for each way all from features to tokens.

    Raises:
        AssertionError: a way finds other labels than were planted.
    """
    arms: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        T = round(100 * seconds / SUBSAMPLING)
        plan = planted_text(model.decoder, B, T, prompt=PROMPT).to(device, dtype)
        noise = torch.randn(
            B, SUBSAMPLING * T, model.bins, generator=torch.Generator().manual_seed(1)
        )
        features = noise.to(device, dtype)
        encode = partial(_encode, model.encoder, features, SUBSAMPLING * plan.lengths)
        arms[f"{name}_encoder"] = encode
        for way, options in ways.items():
            arm = partial(_hear, encode, plan, options)
            assert arm().tokens() == plan.labels, f"{way} finds other labels than were planted"
            arms[f"{name}_{way}"] = arm
    return arms


@torch.inference_mode()
def _encode(encoder: nn.Module, features: Tensor, lengths: Tensor) -> Tensor:
    encoded, _ = encoder(features, lengths)
    return encoded


def _hear(encode: Callable[[], object], plan: PlantedText, options: dict[str, Any]) -> Hypotheses:
    """Features to tokens; the decoder reads what is planted."""
    encode()
    return aed_greedy(plan.model, plan.encoded, plan.lengths, prompt=plan.prompt, **options)


def _claims(
    times: Mapping[str, Timing], ways: Mapping[str, object], records: StudyRecords
) -> Iterator[Measurement]:
    """The claims with frames projected in every step; under other names with them kept."""
    for way in ways:
        suffix = "" if way == "recomputed" else f"-{way}"
        deep, shallow = (f"{name}_{way}" for name in NAMES)
        whole, encoder = times[deep], times[f"{NAMES[0]}_encoder"]
        pairs = zip(whole.samples_ms, encoder.samples_ms, strict=False)
        shares = [max(0.0, 1 - alone_ms / ms) for ms, alone_ms in pairs]
        what = f"decoder-bottleneck{suffix}"
        yield records.value(what, shares, whole, way, metric="share", unit="1")
        yield records.ratio(f"decoder-3x{suffix}", times, deep, shallow, arms=NAMES, way=way)
