"""The decoder of each kind of model: `KINDS` maps a model's class to its decoding.

A new kind of model is one more entry of `KINDS`. A Whisper has its own decoder, which wraps that of
its kind (`whisper.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.decoders import (
    Hypotheses,
    NGram,
    WordNGram,
    aed_beam,
    aed_greedy,
    attention_frames,
    ctc_alignment,
    ctc_beam,
    ctc_draft,
    ctc_greedy,
    ctc_greedy_sequential,
    transducer_greedy,
)
from asrkit.decoders.attention.protocol import prompt_of
from asrkit.decoders.beams import LanguageModel
from asrkit.models import AEDModel, CTCModel, TransducerModel
from asrkit.models.ctc import log_probs
from asrkit.models.prompts import PromptFormat
from asrkit.shapes import expect
from asrkit.text import Tokenizer, token_texts
from asrkit.transcribe.options import CTC_WEIGHT, BeamOptions, PromptOptions

# Most utterances in a batch for which the text of a CTC head saves time as a draft. If 5 % of the
# draft is wrong, a CPU decodes one utterance 4 times as fast with it, and 8 of them 1.6 to 1.8
# times; 32 take longer (suite "decoders").
DRAFTED = 8


class DecodeOptions(NamedTuple):
    """Options of decoding; each kind of model uses the options that apply to it."""

    strategy: str  # a name in the values of `ModelKind.strategies`
    graphs: str = "auto"
    max_symbols: int = 10
    confidence: bool = False
    search: BeamOptions | None = None
    lm: LanguageModel | None = None
    prompt: Sequence[int] | Tensor | None = None  # tokens before the text; None: the model's `bos`
    texts: int | None = None  # tokens from this one on have no text and are dropped; None: none
    times: bool = False  # whether every label gets a frame, also where decoding finds none
    timestamps: bool = False  # whether a Whisper writes the times of its segments
    languages: Sequence[str] = ()  # one for each utterance, "" where a Whisper detects it
    previous: Sequence[Sequence[int]] = ()  # for each utterance, the tokens before its window
    until: Sequence[int] = ()  # for each utterance, the frame before which segments have text


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """How models of one class are decoded."""

    # from (model, frames (B, T, P), lengths (B,), DecodeOptions) to hypotheses
    decode: Callable[[Any, Tensor, Tensor, DecodeOptions], Hypotheses]
    # the model's linear layer from encoder output to CTC logits; None if it has none
    ctc_head: Callable[[Any], nn.Module | None]
    # from strategies of PipelineConfig to the decoder's names
    strategies: Mapping[str, str]
    # from (model, encoder output (B, T, D)) to the frames that `decode` takes (B, T, P)
    project: Callable[[Any, Tensor], Tensor] = lambda model, encoded: encoded
    beam: Sequence[str] = ()  # fields of BeamOptions that its beam search uses; (): it has none


def read_lm(
    search: BeamOptions | None, tokenizer: Tokenizer | None, device: torch.device
) -> LanguageModel | None:
    """The n-gram model in the options, over a tokenizer's tokens and the blank; None without one.

    Args:
        search: Options of the beam; None: greedy decoding.
        tokenizer: Tokenizer of the model.
        device: Where the scores are computed.

    Raises:
        ValueError: The file is no valid ARPA file.
        OSError: The file cannot be read.
    """
    if search is None or search.lm is None:
        return None
    assert tokenizer is not None, "an n-gram model needs it: Recognizer.from_checkpoint has it"
    expect(search.lm.is_file(), "lm", "an ARPA file", repr(str(search.lm)), "Check the path.")
    texts = token_texts(tokenizer)
    if search.lm_units == "words":
        return WordNGram.read(search.lm, [*texts, ""], word_bonus=search.word_bonus).to(device)
    written = ["<space>" if text == " " else text for text in texts]
    return NGram.read(search.lm, [*written, "<blank>"]).to(device)


def prompt_tokens(name: str, format_: PromptFormat | None, options: PromptOptions) -> Any:
    """Token ids of the prompt that the options describe; None if the model has no prompt.

    Args:
        name: Name of the model's class.
        format_: Format of its prompt; None: the prompt is the token `bos`, or there is none.
        options: Language, task and punctuation.

    Raises:
        ValueError: The prompt has no place for an option.
    """
    given = options.given()
    wanted = f"none, since this {name} has no prompt with a place for it"
    for option, value in given.items():
        expect(format_ is not None and option != "fallback", option, wanted, repr(value))
    return None if format_ is None else format_.tokens(**given)


def _decode_transducer(
    model: TransducerModel, encoded: Tensor, lengths: Tensor, options: DecodeOptions
) -> Hypotheses:
    names = ("strategy", "graphs", "max_symbols", "confidence")
    keywords = {name: getattr(options, name) for name in names}
    return transducer_greedy(model, encoded, lengths, **keywords)


def _decode_ctc(
    model: CTCModel, encoded: Tensor, lengths: Tensor, options: DecodeOptions
) -> Hypotheses:
    scores = log_probs(model.output(encoded))  # (B, T, V)
    beam = options.search
    if beam is None:
        decode = ctc_greedy_sequential if options.strategy == "one_by_one" else ctc_greedy
        hypotheses = decode(scores, lengths)
    else:
        hypotheses = ctc_beam(
            scores,
            lengths,
            width=beam.beam,
            top_tokens=beam.top_tokens,
            lm=options.lm,
            lm_weight=beam.lm_weight,
            label_bonus=beam.label_bonus,
        )
    if not options.confidence:
        return hypotheses
    return replace(hypotheses, confidence=_first_frame_probability(hypotheses, scores))


def _first_frame_probability(hypotheses: Hypotheses, scores: Tensor) -> Tensor:
    """Probability of each label on the first frame of its run: (B, N), -1 in the padding."""
    rows = torch.arange(len(scores), device=scores.device)[:, None]
    frames = hypotheses.frames.clamp(min=0)
    labels = hypotheses.labels.clamp(min=0)
    probability = scores[rows, frames, labels].exp()
    return probability.masked_fill(hypotheses.labels < 0, -1.0).float()


def _decode_attention(
    model: AEDModel, encoded: Tensor, lengths: Tensor, options: DecodeOptions
) -> Hypotheses:
    search = options.search
    frames = model.encoder_projection(encoded)
    weight = CTC_WEIGHT if search is None else search.ctc_weight
    drafts = search is None and len(encoded) <= DRAFTED
    ctc: Tensor | None = None  # CTC scores, if used; at weight 0 the head may be untrained
    if model.ctc_head is not None and weight > 0 and (search or drafts or options.times):
        ctc = log_probs(model.ctc_head(encoded))
    if search is not None:
        hypotheses = beam_decode(model, frames, lengths, options, ctc=ctc, ctc_weight=weight)
    else:
        draft = ctc_draft(model, ctc_greedy(ctc, lengths)) if ctc is not None and drafts else None
        hypotheses = aed_greedy(
            model,
            frames,
            lengths,
            draft=draft,
            prompt=options.prompt,
            confidence=options.confidence,
        )
    if options.times and ctc is not None:
        return _timed_by_ctc(model, frames, lengths, hypotheses, options, ctc)
    if options.times:
        hypotheses = timed_by_attention(model, frames, lengths, hypotheses, options)
    return with_texts(hypotheses, options)


def beam_decode(
    model: Any, frames: Tensor, lengths: Tensor, options: DecodeOptions, **joint: Any
) -> Hypotheses:
    """Hypotheses of a beam; if requested, with each label's probability given those before it.

    Args:
        model: An encoder-decoder model.
        frames: (B, T, D), as its decoder takes them.
        lengths: (B,) valid frames.
        options: Options of decoding, with a beam.
        **joint: CTC scores and their weight, as `aed_beam` takes them.
    """
    assert options.search is not None
    width = options.search.beam
    hypotheses = aed_beam(model, frames, lengths, prompt=options.prompt, width=width, **joint)
    if not options.confidence:
        return hypotheses
    prompts = prompt_of(model, options.prompt, frames)
    padding = hypotheses.labels < 0
    labels = hypotheses.labels.masked_fill(padding, model.eos)
    logits = model.logits(frames, lengths, torch.cat([prompts, labels[:, :-1]], 1))
    chosen = log_probs(logits)[:, prompts.shape[1] - 1 :].gather(2, labels[..., None])
    return replace(hypotheses, confidence=chosen[..., 0].exp().float().masked_fill(padding, -1.0))


def with_texts(hypotheses: Hypotheses, options: DecodeOptions) -> Hypotheses:
    """The hypotheses without labels that have no text, such as the tokens of a prompt."""
    if options.texts is None:
        return hypotheses
    return hypotheses.filter(hypotheses.labels < options.texts)


def timed_by_attention(
    model: AEDModel,
    frames: Tensor,
    lengths: Tensor,
    hypotheses: Hypotheses,
    options: DecodeOptions,
    memory: Any = None,
) -> Hypotheses:
    """The labels on the frames of the largest cross-attention weights."""
    prompt = options.prompt
    times = attention_frames(model, frames, lengths, hypotheses, prompt=prompt, memory=memory)
    return replace(hypotheses, frames=times)


def _timed_by_ctc(
    model: AEDModel,
    frames: Tensor,
    lengths: Tensor,
    hypotheses: Hypotheses,
    options: DecodeOptions,
    ctc: Tensor,
) -> Hypotheses:
    """The labels that have a text, on the frames that CTC aligns them to.

    A text that is too long for its frames, such as endless repetition, gets the frames of attention
    instead.
    """
    written = with_texts(hypotheses, options)
    aligned, durations, scores = ctc_alignment(ctc, lengths, written)
    fits = scores.isfinite()[:, None]
    if not bool(fits.all()):
        attended = timed_by_attention(model, frames, lengths, hypotheses, options)
        attended = with_texts(attended, options)
        aligned = aligned.where(fits, attended.frames)
        durations = durations.where(fits, attended.durations)
    return replace(written, frames=aligned, durations=durations)


KINDS = {
    TransducerModel: ModelKind(
        project=lambda model, encoded: model.encoder_projection(encoded),
        decode=_decode_transducer,
        ctc_head=attrgetter("ctc_head"),
        strategies={
            "fastest": "windowed_looping",
            "batched": "frame_looping",
            "one_by_one": "one_by_one",
            "frame_looping": "frame_looping",
            "label_looping": "label_looping",
            "windowed_looping": "windowed_looping",
        },
    ),
    CTCModel: ModelKind(
        decode=_decode_ctc,
        ctc_head=attrgetter("output"),
        strategies={"fastest": "batched", "batched": "batched", "one_by_one": "one_by_one"},
        beam=("lm", "label_bonus", "top_tokens"),
    ),
    AEDModel: ModelKind(
        decode=_decode_attention,
        ctc_head=attrgetter("ctc_head"),
        strategies={"fastest": "batched", "batched": "batched"},
        beam=("ctc_weight",),
    ),
}


def kind_of(model: nn.Module) -> ModelKind:
    """The entry of `KINDS` for a model; ValueError if its class has none."""
    kinds = [entry for kind, entry in KINDS.items() if isinstance(model, kind)]
    known = ", ".join(kind.__name__ for kind in KINDS)
    expect(bool(kinds), "model", f"one of {known}", type(model).__name__)
    return kinds[0]
