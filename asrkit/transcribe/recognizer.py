"""The one recogniser: waveforms to features, encoder frames and hypotheses.

`asrkit transcribe`, evaluation in training, the benchmarks and the notebooks all use it, each with
a `PipelineConfig` of its own.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, starmap
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from asrkit.cpu import fast_dtype
from asrkit.decoders import Hypotheses
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import Checkpoint
from asrkit.models.common import dtype_of, own_weights
from asrkit.models.inference import Encode, EncoderGraphs, cast_copy, optimize, tf32
from asrkit.models.prompts import WHISPER, PromptFormat
from asrkit.shapes import dims, expect, expect_choice
from asrkit.text import Tokenizer
from asrkit.transcribe.decoding import DecodeOptions, kind_of, prompt_tokens, read_lm
from asrkit.transcribe.options import BeamOptions, PipelineConfig, PromptOptions
from asrkit.transcribe.whisper import WhisperDecoder

WEIGHT_DTYPES = {  # dtype of the weights for each precision; "as_loaded" keeps the model's
    "float32": torch.float32,
    "tf32": torch.float32,
    "autocast": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ENCODED = 2  # windows of a Whisper that a CPU encodes together, which bounds the memory
FEATURE_SAMPLES = 2**19  # samples whose features a CPU computes together, for the same reason
MAX_SYMBOLS = 10  # most labels on one frame, if the checkpoint's notes have no number


def recognize(checkpoint: Checkpoint, waveforms: Tensor, lengths: Tensor) -> Hypotheses:
    """Greedy hypotheses of B waveforms, by a recogniser that is used once.

    The encoder is not optimized, which takes longer than one batch gains. A `Recognizer` optimizes
    it once for many batches.

    Args:
        checkpoint: Model and feature settings.
        waveforms: (B, S) float in [-1, 1] at the model's sampling rate.
        lengths: (B,) valid samples of each waveform.
    """
    recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(encoder="eager"))
    return recognizer(waveforms, lengths)


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first weight or buffer; the CPU if it has none."""
    return next(chain(module.parameters(), module.buffers()), torch.empty(0, device="cpu")).device


def encoder_form(config: PipelineConfig, device: torch.device) -> Literal["eager", "optimized"]:
    """The form of the encoder in `config`; for "auto", the fastest known one on `device`.

    On CUDA that is eager: a graph costs four calls of each shape before it is replayed. On an H100
    a graph then halved the time of one utterance, but saved at most a tenth on a batch of 32.
    """
    if config.encoder != "auto":
        return config.encoder
    if device.type == "cpu" and config.precision != "autocast":
        return "optimized"
    return "eager"


def weight_dtype(model: nn.Module, config: PipelineConfig) -> torch.dtype:
    """The dtype of the weights of `model` under `config`; with int8, of the other weights.

    Args:
        model: The model as it was loaded.
        config: How to compute.
    """
    if config.precision == "int8":
        return getattr(torch, fast_dtype())
    return WEIGHT_DTYPES.get(config.precision, dtype_of(model))


class ModelVariants:
    """Variants of one model with the dtypes and weight layouts of configs; each is built once.

    Recognizers that share a `ModelVariants` share the variants, the CUDA graphs of their encoders,
    and the graphs' memory.

    Args:
        model: The model in eval mode, on its device.
        in_place: Whether to change `model` itself, which saves the memory of a copy; for one config
            only.
    """

    def __init__(self, model: nn.Module, *, in_place: bool = False) -> None:
        self.model = model
        self.in_place = in_place
        self.variants: dict[tuple[torch.dtype, bool, bool], nn.Module] = {}
        self.graphs: dict[str, EncoderGraphs] = {}

    def model_for(self, config: PipelineConfig) -> Any:
        """The variant with the precision and the form of encoder in `config`.

        Args:
            config: How to compute, with an encoder that is not "auto".

        Raises:
            ValueError: `config` has int8, which the model or this CPU does not support.
        """
        dtype = weight_dtype(self.model, config)
        optimized = config.encoder == "optimized"
        int8 = config.precision == "int8"
        key = (dtype, optimized, int8)
        if key not in self.variants:
            variant = self.model
            in_place_dtype = dtype if self.in_place else None
            if not in_place_dtype and (optimized or dtype != dtype_of(variant)):
                variant = cast_copy(variant, dtype)
            if optimized:
                layers: Any = "int8" if int8 else "as_it_is"
                variant = optimize(variant, linear_layers=layers, dtype=in_place_dtype)
            elif in_place_dtype:
                own_weights(variant, in_place_dtype, device_of(variant))
            self.variants[key] = variant
        return self.variants[key]

    def graphs_for(self, config: PipelineConfig, encode: Encode) -> EncoderGraphs:
        """The CUDA graphs of `encode`, which all configs with this precision share."""
        if config.precision not in self.graphs:
            most = getattr(self.model.encoder, "most_frames", None)
            self.graphs[config.precision] = EncoderGraphs(encode, self.pool, most)
        return self.graphs[config.precision]

    @cached_property
    def pool(self) -> Any:
        """The graphs' memory."""
        return torch.cuda.graph_pool_handle()


class Recognizer:
    """A model with everything that turns waveforms into hypotheses under one config.

    A call runs the three stages `features`, `encode` and `decode`, which can also be called one by
    one.

    Args:
        model: A model of a class in asrkit.transcribe.decoding.KINDS, or `ModelVariants` to share.
        config: How to compute; None: the defaults. On a CPU these optimize a copy of the encoder,
            which does not follow later changes of the weights.
        features: Log-mel settings of the model.
        tokenizer: Tokenizer of the model. It is needed to read an n-gram model, and to know which
            tokens of an encoder-decoder model have a text.
        notes: Notes of the checkpoint: most labels on one frame (`max_symbols`), the prompt of an
            encoder-decoder model, and the tokens that a Whisper may write.

    Raises:
        ValueError: The model or its device does not support an option of `config`.

    >>> config = PipelineConfig(precision="bfloat16", encoder="optimized")
    >>> recognizer = Recognizer.from_checkpoint(checkpoint, config)  # doctest: +SKIP
    >>> recognizer(waveforms, lengths).tokens()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module | ModelVariants,
        config: PipelineConfig | None = None,
        *,
        features: FeatureConfig | None = None,
        tokenizer: Tokenizer | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        variants = model if isinstance(model, ModelVariants) else ModelVariants(model)
        self.kind = kind_of(variants.model)
        self.device = device_of(variants.model)
        config = config or PipelineConfig()
        self.config = replace(config, encoder=encoder_form(config, self.device))
        expect_choice("strategy", config.strategy, [*self.kind.strategies])
        if config.search is not None:
            self._check_beam(config.search, variants.model)
        self.feature_config = features or FeatureConfig()
        self.dtype = weight_dtype(variants.model, self.config)
        self.model = variants.model_for(self.config)
        self._set_decoder(tokenizer, notes or {})
        self.run_encoder: Encode = self._encode
        if self.config.encoder == "optimized" and self.device.type == "cuda":
            self.run_encoder = variants.graphs_for(self.config, self._encode)

    def _set_decoder(self, tokenizer: Tokenizer | None, notes: Mapping[str, Any]) -> None:
        """Set the decoder and its options."""
        config = self.config
        self.decode_options = DecodeOptions(
            strategy=self.kind.strategies[config.strategy],
            graphs=config.graphs,
            max_symbols=notes.get("max_symbols", MAX_SYMBOLS),
            search=config.search,
            lm=read_lm(config.search, tokenizer, self.device),
            texts=None if tokenizer is None else tokenizer.vocab_size,
        )
        prompt_options = config.prompt or PromptOptions()
        self.decoder: WhisperDecoder | partial[Hypotheses]
        if WHISPER in notes:
            self.decoder = WhisperDecoder(self.model, notes, tokenizer, prompt_options)
            return
        self.decoder = partial(self.kind.decode, self.model)
        format_ = PromptFormat.from_notes(notes)
        prompt = prompt_tokens(type(self.model).__name__, format_, prompt_options)
        self.decode_options = self.decode_options._replace(prompt=prompt)

    @property
    def detects_language(self) -> bool:
        """Whether it detects the language of each recording: a multilingual Whisper without a
        `language` option.
        """
        return isinstance(self.decoder, WhisperDecoder) and self.decoder.detects

    @property
    def writes_timestamps(self) -> bool:
        """Whether it can write the times of segments, as a Whisper can."""
        return isinstance(self.decoder, WhisperDecoder)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: PipelineConfig | None = None,
        *,
        in_place: bool = False,
    ) -> Self:
        """The recogniser of a checkpoint.

        Args:
            checkpoint: Model, tokenizer, feature settings and notes.
            config: How to compute; None: the defaults.
            in_place: Whether to optimize the checkpoint's model itself instead of a copy. This
                saves memory, but the model cannot be saved or trained afterwards.
        """
        expect(
            isinstance(checkpoint, Checkpoint),
            "checkpoint",
            "a Checkpoint",
            type(checkpoint).__name__,
            "Pass load_checkpoint(path).",
        )
        return cls(
            ModelVariants(checkpoint.model, in_place=in_place),
            config,
            features=FeatureConfig(**checkpoint.features),
            tokenizer=checkpoint.tokenizer,
            notes=checkpoint.notes,
        )

    def __call__(self, waveforms: Tensor, lengths: Tensor, **options: Any) -> Hypotheses:
        """Hypotheses of B waveforms.

        Args:
            waveforms: (B, S) float in [-1, 1] at the model's sampling rate, on any device.
            lengths: (B,) valid samples of each waveform.
            **options: Options of `decode`.
        """
        rows = len(waveforms)
        if self.feature_config.fill_s and self.device.type == "cpu":
            rows = ENCODED  # windows of one length are encoded as fast in small batches
        parts = zip(waveforms.split(rows), lengths.split(rows), strict=True)
        encoded, ends = zip(*(self.encode(*self.features(*part)) for part in parts), strict=True)
        if len(encoded) > 1:
            encoded, ends = (torch.cat(encoded),), (torch.cat(ends),)
        return self.decode(*encoded, *ends, **options)

    @torch.inference_mode()
    def features(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised log-mel features (B, T, F) float32 and lengths (B,) in frames.

        Args:
            waveforms: (B, S) float in [-1, 1].
            lengths: (B,) valid samples.
        """
        B, S = dims(waveforms, "B S", "waveforms")
        dims(lengths, "B", "lengths", B=B)
        waveforms = waveforms.to(self.device)
        lengths = lengths.to(self.device)
        compute = partial(log_mel, config=self.feature_config)
        rows = max(1, FEATURE_SAMPLES // max(1, S))
        with self._arithmetic():
            if rows >= B or self.device.type != "cpu":
                return compute(waveforms, lengths)
            parts = zip(waveforms.split(rows), lengths.split(rows), strict=True)
            features, frames = zip(*starmap(compute, parts), strict=True)
        return torch.cat(features), torch.cat(frames)

    @torch.inference_mode()
    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames that `decode` takes, (B, T, P), and lengths (B,).

        With CUDA graphs of the encoder both are overwritten by the next call.

        Args:
            features: (B, T, F) float32.
            lengths: (B,) in feature frames.
        """
        with self._arithmetic():
            return self.run_encoder(features, lengths)

    @torch.inference_mode()
    def decode(
        self,
        encoded: Tensor,
        lengths: Tensor,
        *,
        confidence: bool = False,
        times: bool = False,
        timestamps: bool = False,
        languages: Sequence[str] = (),
        previous: Sequence[Sequence[int]] = (),
        until: Sequence[int] = (),
    ) -> Hypotheses:
        """Hypotheses of encoded frames, greedy ones or those of a beam, as the config says.

        Args:
            encoded: (B, T, P), as `encode` returns them.
            lengths: (B,) in encoder frames.
            confidence: Whether to return each label's probability; for CTC, that on its first
                frame.
            times: Whether to find the frames of an encoder-decoder model's labels: those that its
                CTC head aligns them to, or without a head those of the largest cross-attention.
            timestamps: Whether a Whisper writes the times of its segments. Its labels then keep
                within them.
            languages: For a Whisper, the language of each utterance, "" where it is not known.
            previous: For a Whisper, the tokens before each utterance; as many for each.
            until: For a Whisper, a frame for each utterance. In greedy decoding a later segment has
                text if it begins before that frame.
        """
        # In inference mode autocast does not cache casts: a decoder under autocast would cast its
        # weights at each of its many small steps.
        if self.config.precision != "as_loaded":
            encoded = encoded.to(self.dtype)
        options = self.decode_options._replace(
            confidence=confidence,
            times=times,
            timestamps=timestamps,
            languages=languages,
            previous=previous,
            until=until,
        )
        with self._arithmetic():
            return self.decoder(encoded, lengths, options)

    def _encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        casts: AbstractContextManager[Any] = nullcontext()
        if self.config.precision == "autocast":
            casts = torch.autocast(self.device.type, torch.bfloat16)
        with casts:
            encoded, ends = self.model.encoder(features, lengths)
            return self.kind.project(self.model, encoded), ends

    def _arithmetic(self) -> AbstractContextManager[None]:
        """Allow or forbid TF32; the precision "as_loaded" keeps torch's setting."""
        if self.config.precision == "as_loaded":
            return nullcontext()
        return tf32(self.config.precision == "tf32")

    def _check_beam(self, beam: BeamOptions, model: nn.Module) -> None:
        """ValueError unless the beam search of `model` has these options."""
        name, supported = type(model).__name__, self.kind.beam
        remedy = "CTC and encoder-decoder models have a beam search."
        expect(bool(supported), "beam", f"none for {name}", beam.beam, remedy)
        if self.kind.ctc_head(model) is None:
            supported = ()
            name += " without a CTC head"
        for option in ("lm", "label_bonus", "top_tokens", "ctc_weight"):
            value = getattr(beam, option)
            is_default = value == getattr(BeamOptions, option)
            expect(is_default or option in supported, option, f"none for {name}", value)
