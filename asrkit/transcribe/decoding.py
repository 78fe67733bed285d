"""Which decoder a model needs: one table from the kind of a model to how it becomes hypotheses.

A new kind of model is one more line in `KINDS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

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
from asrkit.decoders.beams import LanguageModel
from asrkit.models import AEDModel, CTCModel, TransducerModel
from asrkit.models.prompts import PromptFormat
from asrkit.models.transducer import log_probs
from asrkit.shapes import expect
from asrkit.text import Tokenizer, token_texts
from asrkit.transcribe.options import CTC_WEIGHT, BeamOptions, PromptOptions

# Most utterances of a batch for which a CTC head's text saves time as a draft. Where 5 % of it is
# wrong, one is decoded 4 times as fast with it on a CPU, 8 of them 1.6 to 1.8 times; 32 take longer
# (suite "decoders").
DRAFTED = 8


class DecodeOptions(NamedTuple):
    """Options of decoding; each kind of model uses those that apply to it."""

    strategy: str  # one of the kind's own names
    graphs: str = "auto"
    max_symbols: int = 10
    confidence: bool = False
    search: BeamOptions | None = None
    lm: LanguageModel | None = None
    prompt: list[int] | None = None  # token ids before the text; None: the model's `bos`
    texts: int | None = None  # tokens below have a text, the rest stay out; None: all have one
    times: bool = False  # whether labels get frames where decoding leaves them open


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """How models of one class become hypotheses."""

    # (model, encoder output (B, T, D)) to the frames that `decode` takes (B, T, P)
    project: Callable[[Any, Tensor], Tensor]
    # (model, frames (B, T, P), lengths (B,), DecodeOptions) to hypotheses
    decode: Callable[[Any, Tensor, Tensor, DecodeOptions], Hypotheses]
    # the model's linear layer from encoder output to CTC logits, None where it has none
    ctc_head: Callable[[Any], nn.Module | None]
    # strategies of PipelineConfig to the decoder's names for them
    strategies: Mapping[str, str]
    captures: bool  # whether the decoder's loop can be a CUDA graph
    beams: bool = False  # whether `decode` knows beam search
    beam_confidence: bool = False  # whether its beam search knows each label's probability
    fusion: bool = False  # whether its beam search takes n-gram models, bonuses and `top_tokens`
    joint: bool = False  # whether its beam search asks the CTC head too
    prompts: bool = False  # whether its texts begin behind a prompt


def read_lm(search: BeamOptions | None, tokenizer: Tokenizer | None) -> LanguageModel | None:
    """The n-gram model that `search` names, over a tokenizer's tokens and the blank; None if none.

    Raises:
        ValueError: There is no such file or no tokenizer, or what the file holds is wrong.
    """
    if search is None or search.lm is None:
        return None
    expect(
        tokenizer is not None,
        "tokenizer",
        "the model's, to read an n-gram model with",
        "none",
        "Recognizer.from_checkpoint has it.",
    )
    expect(search.lm.is_file(), "lm", "a file in ARPA format", str(search.lm))
    texts = token_texts(cast(Tokenizer, tokenizer))
    if search.lm_units == "words":
        return WordNGram.read(search.lm, [*texts, ""], word_bonus=search.word_bonus)
    written = ["<space>" if text == " " else text for text in texts]
    return NGram.read(search.lm, [*written, "<blank>"])


def prompt_tokens(
    kind: ModelKind, name: str, format_: PromptFormat | None, asked: PromptOptions | None
) -> list[int] | None:
    """Token ids of the prompt that `asked` describes; None where the model has none.

    Args:
        kind: Of the model.
        name: Its class.
        format_: Its prompt's form; None for a model whose prompt is its token `bos` alone.
        asked: What it is asked for; None: its defaults.

    Raises:
        ValueError: The model cannot be asked for that.
    """
    given = asked.given() if asked is not None else {}
    if kind.prompts and format_ is not None:
        return format_.tokens(**given)
    for option, value in given.items():
        wanted = f"none, since this {name} has no prompt with a place for it"
        expect(False, option, wanted, repr(value), "Some encoder-decoder models have one.")
    return None


def _projected(model: TransducerModel, encoded: Tensor) -> Tensor:
    return model.encoder_projection(encoded)


def _as_encoded(model: nn.Module, encoded: Tensor) -> Tensor:
    return encoded


def _own_ctc_head(model: TransducerModel | AEDModel) -> nn.Module | None:
    return model.ctc_head


def _ctc_output(model: CTCModel) -> nn.Module:
    return model.output


def _decode_transducer(
    model: TransducerModel, encoded: Tensor, lengths: Tensor, options: DecodeOptions
) -> Hypotheses:
    keywords: dict[str, Any] = {"strategy": options.strategy, "graphs": options.graphs}
    keywords["confidence"] = options.confidence
    return transducer_greedy(model, encoded, lengths, max_symbols=options.max_symbols, **keywords)


_CTC_DECODERS = {"batched": ctc_greedy, "one_by_one": ctc_greedy_sequential}


def _decode_ctc(
    model: CTCModel, encoded: Tensor, lengths: Tensor, options: DecodeOptions
) -> Hypotheses:
    scores = log_probs(model.output(encoded))  # (B, T, V)
    beam = options.search
    if beam is None:
        hypotheses = _CTC_DECODERS[options.strategy](scores, lengths)
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
    """Probability of each label on the first frame of its run: (B, N), padding -1."""
    rows = torch.arange(len(scores), device=scores.device)[:, None]
    frames = hypotheses.frames.clamp(min=0)
    labels = hypotheses.labels.clamp(min=0)
    probability = scores[rows, frames, labels].exp()
    return probability.masked_fill(hypotheses.labels < 0, -1.0).float()


def _joint_with_ctc(model: AEDModel, encoded: Tensor, search: BeamOptions) -> dict[str, Any]:
    """Arguments of `aed_beam` by which the CTC head has a say; none where it has not."""
    weight = CTC_WEIGHT if search.ctc_weight is None else search.ctc_weight
    if model.ctc_head is None or weight == 0:
        return {}
    return {"ctc": log_probs(model.ctc_head(encoded)), "ctc_weight": weight}


def _draft(model: AEDModel, encoded: Tensor, lengths: Tensor) -> Hypotheses | None:
    """What the CTC head reads, for the decoder to verify; None where that takes longer."""
    if model.ctc_head is None or len(encoded) > DRAFTED:
        return None
    return ctc_draft(model, ctc_greedy(log_probs(model.ctc_head(encoded)), lengths))


def _decode_attention(
    model: AEDModel, encoded: Tensor, lengths: Tensor, options: DecodeOptions
) -> Hypotheses:
    prompt = options.prompt
    frames = model.encoder_projection(encoded)
    if options.search is not None:
        width = options.search.beam
        joint = _joint_with_ctc(model, encoded, options.search)
        found = aed_beam(model, frames, lengths, prompt=prompt, width=width, **joint)
    else:
        draft = _draft(model, encoded, lengths)
        found = aed_greedy(
            model, frames, lengths, prompt=prompt, draft=draft, confidence=options.confidence
        )
    if not options.times:
        return _with_texts(found, options)
    if _times_by_ctc(model, options):
        return _timed_by_ctc(model, encoded, lengths, found, options)
    return _timed_by_attention(model, encoded, lengths, found, options)


def _with_texts(hypotheses: Hypotheses, options: DecodeOptions) -> Hypotheses:
    """The hypotheses without labels that have no text, such as the tokens of a prompt."""
    if options.texts is None:
        return hypotheses
    return hypotheses.only(hypotheses.labels < options.texts)


def _times_by_ctc(model: AEDModel, options: DecodeOptions) -> bool:
    """Whether the CTC head says when a label was spoken.

    Not where a beam is told not to ask it: it may not have been trained.
    """
    told_not_to = options.search is not None and options.search.ctc_weight == 0
    return model.ctc_head is not None and not told_not_to


def _timed_by_attention(
    model: AEDModel, encoded: Tensor, lengths: Tensor, found: Hypotheses, options: DecodeOptions
) -> Hypotheses:
    """The labels that have a text, on the frames that attention looks at."""
    frames = model.encoder_projection(encoded)
    times = attention_frames(model, frames, lengths, found, prompt=options.prompt)
    return _with_texts(replace(found, frames=times), options)


def _timed_by_ctc(
    model: AEDModel, encoded: Tensor, lengths: Tensor, found: Hypotheses, options: DecodeOptions
) -> Hypotheses:
    """The labels that have a text, on the frames that the CTC head aligns them to.

    A text that is too long for its frames, as one that goes round in circles, keeps the frames that
    attention looks at.
    """
    assert model.ctc_head is not None
    said = _with_texts(found, options)
    ctc = log_probs(model.ctc_head(encoded))
    frames, durations, scores = ctc_alignment(ctc, lengths, said)
    fits = scores.isfinite()[:, None]
    if not bool(fits.all()):
        attended = _timed_by_attention(model, encoded, lengths, found, options)
        frames = torch.where(fits, frames, attended.frames)
        durations = torch.where(fits, durations, attended.durations)
    return replace(said, frames=frames, durations=durations)


KINDS: dict[type[nn.Module], ModelKind] = {
    TransducerModel: ModelKind(
        project=_projected,
        decode=_decode_transducer,
        ctc_head=_own_ctc_head,
        strategies={
            "fastest": "windowed_looping",
            "batched": "frame_looping",
            "one_by_one": "one_by_one",
            "frame_looping": "frame_looping",
            "label_looping": "label_looping",
            "windowed_looping": "windowed_looping",
        },
        captures=True,
    ),
    CTCModel: ModelKind(
        project=_as_encoded,
        decode=_decode_ctc,
        ctc_head=_ctc_output,
        strategies={"fastest": "batched", "batched": "batched", "one_by_one": "one_by_one"},
        captures=False,
        beams=True,
        beam_confidence=True,
        fusion=True,
    ),
    AEDModel: ModelKind(
        project=_as_encoded,
        decode=_decode_attention,
        ctc_head=_own_ctc_head,
        strategies={"fastest": "batched", "batched": "batched"},
        captures=False,
        beams=True,
        joint=True,
        prompts=True,
    ),
}


def kind_of(model: nn.Module) -> ModelKind:
    """The entry of `KINDS` for a model; ValueError where its class has none."""
    for kind, entry in KINDS.items():
        if isinstance(model, kind):
            return entry
    *names, last = [kind.__name__ for kind in KINDS]
    expect(False, "model", f"{', '.join(names)} or {last}", type(model).__name__)
    raise AssertionError  # unreachable: `expect` has raised
