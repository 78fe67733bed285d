"""The one recogniser: waveforms to features, encoder frames and hypotheses.

`asrkit transcribe`, evaluation in training, the benchmarks and the notebooks all use it, each with
a `PipelineConfig` of its own.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from asrkit.cpu import fast_dtype
from asrkit.decoders import Hypotheses
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import Checkpoint
from asrkit.models.common import dtype_of
from asrkit.models.inference import Encode, EncoderGraphs, cast_copy, optimize, tf32
from asrkit.models.prompts import WHISPER, PromptFormat
from asrkit.shapes import expect, expect_choice
from asrkit.text import Tokenizer
from asrkit.transcribe.decoding import DecodeOptions, kind_of, prompt_tokens, read_lm
from asrkit.transcribe.options import BeamOptions, PipelineConfig, PromptOptions
from asrkit.transcribe.whisper import WhisperDecoder

WEIGHTS = {  # dtype of the weights, by precision; "as_loaded" keeps the model's
    "float32": torch.float32,
    "tf32": torch.float32,
    "autocast": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ENCODED = 2  # windows of a Whisper that a CPU encodes at a time, which bounds the memory
MAX_SYMBOLS = 10  # most labels on one frame, where neither config nor checkpoint has a number


def recognize(
    checkpoint: Checkpoint,
    waveforms: Tensor,
    lengths: Tensor,
    *,
    max_symbols: int | None = None,
    confidence: bool = False,
) -> Hypotheses:
    """Greedy hypotheses of B waveforms, by a recogniser that is used once.

    The encoder runs as it is: to prepare it takes longer than one batch gains. A `Recognizer`
    prepares it once for many batches.

    Args:
        checkpoint: model and feature settings.
        waveforms: (B, S) float in [-1, 1] at the model's sampling rate.
        lengths: (B,) valid samples of each.
        max_symbols: most labels on one frame, for a transducer; None: what the checkpoint's notes
            say, or 10.
        confidence: also return each label's probability; for CTC, that on its first frame.
    """
    config = PipelineConfig(encoder="eager", max_symbols=max_symbols)
    recognizer = Recognizer.from_checkpoint(checkpoint, config)
    return recognizer(waveforms, lengths, confidence=confidence)


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first weight or buffer; the CPU where it has none."""
    return next(chain(module.parameters(), module.buffers()), torch.empty(0, device="cpu")).device


def encoder_form(config: PipelineConfig, device: torch.device) -> Literal["eager", "optimized"]:
    """How the encoder runs on `device`: as `config` says, or for "auto" the fastest known way.

    On CUDA that is eager: a graph costs four calls of each shape before it is replayed. On an H100
    it then halved the time of one utterance, and gained a tenth at most on a batch of 32.
    """
    if config.encoder != "auto":
        return config.encoder
    if device.type == "cpu" and config.precision != "autocast":
        return "optimized"
    return "eager"


def weight_dtype(model: nn.Module, config: PipelineConfig) -> torch.dtype:
    """The dtype that the weights of `model` have under `config`; with int8, those that are not.

    Args:
        model: As it was loaded.
        config: How to compute.
    """
    if config.precision == "int8":
        return getattr(torch, fast_dtype())
    return WEIGHTS.get(config.precision, dtype_of(model))


class ModelVariants:
    """One model with the weights and layouts that configs ask for, each made once.

    Recognizers that share it share these variants, the CUDA graphs of their encoders, and the
    graphs' memory.

    Args:
        model: in eval mode, on its device.
        in_place: change `model` itself, which saves the memory of a copy; for one config only.
    """

    def __init__(self, model: nn.Module, *, in_place: bool = False) -> None:
        self.model = model
        self.in_place = in_place
        self.variants: dict[tuple[torch.dtype, bool, bool], nn.Module] = {}
        self.graphs: dict[str, EncoderGraphs] = {}

    def model_for(self, config: PipelineConfig) -> Any:
        """The model with the precision and the encoder of `config`, "eager" or "optimized".

        Raises:
            ValueError: The model or this CPU has no int8, and `config` asks for it.
        """
        dtype = weight_dtype(self.model, config)
        optimized = config.encoder == "optimized"
        int8 = config.precision == "int8"
        key = (dtype, optimized, int8)
        if key not in self.variants:
            made = self.model
            if self.in_place:
                made = made.to(dtype)
            elif optimized or dtype != dtype_of(made):
                made = cast_copy(made, dtype)
            if optimized:
                made = optimize(made, linear_layers="int8" if int8 else "as_it_is")
            self.variants[key] = made
        return self.variants[key]

    def graphs_for(self, config: PipelineConfig, encode: Encode) -> EncoderGraphs:
        """The CUDA graphs of `encode`, shared by all configs with this precision."""
        if config.precision not in self.graphs:
            most = getattr(self.model.encoder, "most_frames", None)
            self.graphs[config.precision] = EncoderGraphs(encode, self.pool, most)
        return self.graphs[config.precision]

    @cached_property
    def pool(self) -> Any:
        """The graphs' memory."""
        return torch.cuda.graph_pool_handle()


class Recognizer:
    """A model with everything that turns waveforms into hypotheses, as `config` says.

    A call runs the three stages `features`, `encode` and `decode`, which can also be called one by
    one.

    Args:
        model: of a class in asrkit.transcribe.decoding.KINDS, or its `ModelVariants` to share.
        config: how to compute; None: the defaults, which prepare a copy of the encoder on a CPU:
            it does not see later changes of the weights.
        features: log-mel settings of the model.
        tokenizer: of the model, to read an n-gram model with, if `config` names one, and to know
            which tokens of an encoder-decoder model have a text.
        notes: of the checkpoint: most labels on one frame (`max_symbols`), the prompt of an
            encoder-decoder model, and what a Whisper may write.

    Raises:
        ValueError: the model or its device cannot do what `config` asks for.

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
        """Choose what turns encoded frames into hypotheses."""
        config = self.config
        self.decode_options = DecodeOptions(
            strategy=self.kind.strategies[config.strategy],
            graphs=config.graphs,
            max_symbols=config.max_symbols or notes.get("max_symbols", MAX_SYMBOLS),
            search=config.search,
            lm=read_lm(config.search, tokenizer, self.device),
            texts=None if tokenizer is None else tokenizer.vocab_size,
        )
        asked = config.prompt or PromptOptions()
        self.decoder: WhisperDecoder | partial[Hypotheses]
        if WHISPER in notes:
            self.decoder = WhisperDecoder(self.model, notes, tokenizer, asked)
            return
        self.decoder = partial(self.kind.decode, self.model)
        format_ = PromptFormat.from_notes(notes)
        prompt = prompt_tokens(type(self.model).__name__, format_, asked)
        self.decode_options = self.decode_options._replace(prompt=prompt)

    @property
    def detects_language(self) -> bool:
        """Whether it finds the language of each recording itself: a multilingual Whisper that was
        not told one.
        """
        return isinstance(self.decoder, WhisperDecoder) and self.decoder.detects

    @property
    def writes_timestamps(self) -> bool:
        """Whether it can write the times of segments, as a Whisper does."""
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
            checkpoint: model, tokenizer, feature settings and notes.
            config: how to compute; None: the defaults.
            in_place: prepare the checkpoint's model itself instead of a copy, which saves memory;
                it cannot be saved or trained afterwards.
        """
        got = type(checkpoint).__name__
        remedy = "Pass load_checkpoint(path)."
        expect(isinstance(checkpoint, Checkpoint), "checkpoint", "a Checkpoint", got, remedy)
        return cls(
            ModelVariants(checkpoint.model, in_place=in_place),
            config,
            features=FeatureConfig(**checkpoint.features),
            tokenizer=checkpoint.tokenizer,
            notes=checkpoint.notes,
        )

    def __call__(self, waveforms: Tensor, lengths: Tensor, **wanted: Any) -> Hypotheses:
        """Hypotheses of B waveforms.

        Args:
            waveforms: (B, S) float in [-1, 1] at the model's sampling rate, on any device.
            lengths: (B,) valid samples of each.
            **wanted: besides the labels, as `decode` takes it.
        """
        rows = len(waveforms)
        if self.feature_config.fill_s and self.device.type == "cpu":
            rows = ENCODED  # windows of one length, which are encoded as fast in small batches
        parts = zip(waveforms.split(rows), lengths.split(rows), strict=True)
        encoded, ends = zip(*(self.encode(*self.features(*part)) for part in parts), strict=True)
        if len(encoded) > 1:
            encoded, ends = (torch.cat(encoded),), (torch.cat(ends),)
        return self.decode(*encoded, *ends, **wanted)

    @torch.inference_mode()
    def features(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised log-mel features (B, T, F) float32 and lengths (B,) in frames.

        Args:
            waveforms: (B, S) float in [-1, 1].
            lengths: (B,) valid samples.
        """
        waveforms = waveforms.to(self.device)
        lengths = lengths.to(self.device)
        with self._arithmetic():
            return log_mel(waveforms, lengths, config=self.feature_config)

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
            confidence: also return each label's probability; for CTC, that on its first frame.
            times: also find the frames of labels where decoding leaves them open: for an
                encoder-decoder model those that its CTC head aligns them to, or without a head
                those that its attention looks at.
            timestamps: a Whisper writes the times of its segments, which labels then keep within.
            languages: of each utterance what a Whisper is to find in it, "" where it is not known.
            previous: of each utterance the tokens before it, for a Whisper; as many for each.
            until: of each utterance a frame: in greedy decoding a Whisper's segment behind another
                one has text if it begins before that frame.
        """
        # Autocast keeps no casts in inference mode: in a region, a decoder would cast its weights
        # at each of its many small steps.
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
        """TF32 allowed or forbidden, unless torch's settings are to be kept."""
        if self.config.precision == "as_loaded":
            return nullcontext()
        return tf32(self.config.precision == "tf32")

    def _check_beam(self, beam: BeamOptions, model: nn.Module) -> None:
        """ValueError unless `model` has such a beam search."""
        name, takes = type(model).__name__, self.kind.beam
        remedy = "CTC and encoder-decoder models have a beam search."
        expect(bool(takes), "beam", f"none for {name}", beam.beam, remedy)
        if self.kind.ctc_head(model) is None:
            takes = ()
            name += " without a CTC head"
        for option in ("lm", "label_bonus", "top_tokens", "ctc_weight"):
            value = getattr(beam, option)
            plain = value == getattr(BeamOptions, option)
            expect(plain or option in takes, option, f"none for {name}", value)
