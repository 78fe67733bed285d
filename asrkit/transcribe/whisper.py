"""Whisper's decoding (arXiv 2212.04356, section 4.5): it detects the language, writes the times of
segments, and decodes windows with an unlikely text again.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from asrkit.decoders import Hypotheses
from asrkit.decoders.attention import Suppressing, TimedMemory, Timestamps
from asrkit.decoders.attention.alignment import frames_of_turns
from asrkit.decoders.attention.loop import GreedyLoop
from asrkit.decoders.attention.protocol import limits_of
from asrkit.decoders.attention.sampling import Sampler, likeliest
from asrkit.decoders.hypotheses import PADDING, Segment, Segments
from asrkit.decoders.states import map_state
from asrkit.devices import CPU_FLOAT
from asrkit.models import AEDModel
from asrkit.models.prompts import ENGLISH, SUPPRESSED, WHISPER, PromptFormat
from asrkit.threads import eager
from asrkit.transcribe.decoding import DecodeOptions, beam_decode, timed_by_attention, with_texts
from asrkit.transcribe.options import PromptOptions

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)  # of the fallbacks, in order
LEAST_LOG_PROB = -1.0  # mean nats a token, end included; a less likely text needs a fallback
NONSENSE = -2.0  # mean nats a token; a less likely text is worse than a repetition
MOST_COMPRESSED = 2.4  # zlib's factor; a text that it shortens more is a repetition
SLOWEST = 25  # most frames of a label without a known place: half a second
NO_SPEECH = 0.6  # least probability at which the text of a window is dropped, if it is unlikely


class WhisperDecoder:
    """Decodes the encoded frames of a Whisper.

    Args:
        model: The model in evaluation mode.
        notes: Notes of its checkpoint.
        tokenizer: Tokenizer of the model.
        options: Language and task of the prompt, and whether there are fallbacks.

    Raises:
        ValueError: The model does not support an option, or has no token that the notes name.
    """

    def __init__(
        self, model: AEDModel, notes: Mapping[str, Any], tokenizer: Any, options: PromptOptions
    ) -> None:
        given = options.given()
        self.tries_again = given.pop("fallback", True)
        self.model = model
        self.tokenizer = tokenizer
        self.no_times: int = notes[WHISPER]["no_times"]
        self.prompts = prompts_of(notes, given)
        suppressed = {**notes[SUPPRESSED], "prompt_tokens": len(next(iter(self.prompts.values())))}
        self.plain = Suppressing(model, **suppressed)
        self.timed = Timestamps(model, **notes[WHISPER], **suppressed)

    @property
    def detects(self) -> bool:
        """Whether it detects the language itself."""
        return len(self.prompts) > 1

    @eager
    def __call__(self, frames: Tensor, lengths: Tensor, options: DecodeOptions) -> Hypotheses:
        """Hypotheses of encoded frames (B, T, D) and lengths (B,), with their languages."""
        memory = self.model.prefill(frames, lengths)
        languages = self._languages(memory, options.languages or [""] * len(frames))
        model: Suppressing = self.plain
        remembered: Any = memory
        if options.timestamps:
            until = torch.tensor(options.until or [0] * len(frames), device=frames.device)
            model, remembered = self.timed, TimedMemory(memory, until)
        prompts = self._prompts(languages, options).to(frames.device)
        model.prompt_tokens = prompts.shape[1]
        options = options._replace(prompt=prompts)
        decode = partial(greedy, model, confidence=options.confidence, times=options.times)
        if options.search is not None:
            found = beam_decode(model, frames, lengths, options)
        else:
            found = decode(remembered, lengths, prompts)
        drawn_at = torch.zeros(len(frames), **CPU_FLOAT)
        if self.tries_again:
            inputs = (remembered, lengths, prompts)
            found = self._try_again(found, decode, inputs, memory, drawn_at)
        if options.times and options.search is not None:
            found = timed_by_attention(self.model, frames, lengths, found, options, memory)
        segments = None
        if options.timestamps:
            segments = self._segments(found, lengths, drawn_at)
            found = within_segments(found, self.no_times, frames.shape[1])
        return replace(with_texts(found, options), languages=tuple(languages), segments=segments)

    def _prompts(self, languages: Sequence[str], options: DecodeOptions) -> Tensor:
        """The prompts (B, P), which have one length in a batch."""
        prompts = [self.prompts[code] for code in languages]
        if options.timestamps:
            prompts = [prompt[:-1] for prompt in prompts]  # all but <|notimestamps|>
        if options.previous:
            begins = self.no_times - 2  # <|startofprev|>; no speech is between the two
            most = (self.model.max_tokens - 1) // 2
            pairs = zip(options.previous, prompts, strict=True)
            prompts = [
                [begins, *before[1 - most :], *prompt] if before else prompt
                for before, prompt in pairs
            ]
        return torch.tensor(prompts, device="cpu")

    def _segments(
        self, found: Hypotheses, lengths: Tensor, drawn_at: Tensor
    ) -> tuple[Segments, ...]:
        """The whole segments of each text."""
        rows = zip(
            found.tokens(),
            lengths.tolist(),
            drawn_at.tolist(),
            _mean_log_probs(found).tolist(),
            strict=True,
        )
        return tuple(
            Segments(*whole_segments(self._known(tokens), self.no_times, T), *rest)
            for tokens, T, *rest in rows
        )

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that are text or timestamps."""
        size = self.tokenizer.vocab_size
        return [token for token in tokens if token < size or token > self.no_times]

    def _first(self, memory: Any) -> Tensor:
        """Probabilities (B, V) of the token after <|startoftranscript|>."""
        start = memory.mask.new_full((len(memory.mask), 1), self.model.bos, dtype=torch.int64)
        logits, _ = self.model.step(start, self.model.init_state(memory, 1), memory, reach=1)
        return logits[:, 0].softmax(1, dtype=torch.float32)

    def _languages(self, memory: Any, known: Sequence[str]) -> list[str]:
        """The language of each utterance; the likeliest one if it is not known."""
        codes = [*self.prompts]
        if not self.detects:
            return codes * len(known)
        if not all(known):
            tokens = [prompt[1] for prompt in self.prompts.values()]
            likeliest = self._first(memory)[:, tokens].argmax(1).tolist()
            known = [code or codes[index] for code, index in zip(known, likeliest, strict=True)]
        return [*known]

    def _try_again(
        self,
        found: Hypotheses,
        decode: Any,
        inputs: tuple[Any, Tensor, Tensor],
        memory: Any,
        drawn_at: Tensor,
    ) -> Hypotheses:
        """The texts with sampled ones in place of those that fail, and none without speech.

        Args:
            found: The likeliest texts.
            decode: Decodes memory, lengths and prompts at a temperature.
            inputs: These three.
            memory: The model's own memory of the frames.
            drawn_at: (B,), which gets the temperature of each sampled text.
        """
        no_speech: Tensor | None = None
        for temperature in (*TEMPERATURES, None):
            unlikely = _mean_log_probs(found) < LEAST_LOG_PROB
            failed = unlikely | self._repeats(found)
            if not failed.any():
                return found
            if no_speech is None:
                no_speech = self._first(memory)[:, self.no_times - 1]
            silent = unlikely & (no_speech > NO_SPEECH)
            rows = (failed & ~silent).nonzero()[:, 0]
            if temperature is None or not len(rows):
                break
            parts = map_state(lambda part, rows=rows: part[rows], inputs)
            drawn = decode(*parts, temperature=temperature)
            better = self._better(drawn, found, rows)
            found = replaced(found, rows[better], drawn, better)
            drawn_at[rows[better].cpu()] = temperature
        return found.filter(~silent[:, None])

    def _better(self, drawn: Hypotheses, found: Hypotheses, rows: Tensor) -> Tensor:
        """Which of the texts sampled for these rows are better than the present ones.

        Without repetition is better than with it, unless it is nonsense; else likelier is better.
        """
        repeats, repeated = self._repeats(drawn), self._repeats(found)[rows]
        log_probs = _mean_log_probs(drawn)
        likelier = log_probs > _mean_log_probs(found)[rows]
        return torch.where(repeats == repeated, likelier, repeated & (log_probs > NONSENSE))

    def _repeats(self, found: Hypotheses) -> Tensor:
        """Which texts (B,) are repetitions."""
        repeats = []
        for row in found.tokens():
            text = [token for token in row if token < self.tokenizer.vocab_size]
            data = self.tokenizer.decode(text).strip().encode()
            repeats.append(len(data) > MOST_COMPRESSED * len(zlib.compress(data)))
        return torch.tensor(repeats, device=found.labels.device)


def _mean_log_probs(found: Hypotheses) -> Tensor:
    """Log-probability of each text (B,) in nats a token, the end included."""
    ended: Any = found.ended
    return found.scores / (found.lengths + ended).clamp(min=1)


def greedy(
    model: Any,
    memory: Any,
    lengths: Tensor,
    prompts: Tensor,
    *,
    confidence: bool,
    times: bool,
    temperature: float = 0.0,
) -> Hypotheses:
    """Texts from a memory: the likeliest tokens, or tokens drawn at a temperature.

    Args:
        model: A `Suppressing` around an `AEDModel`.
        memory: Its memory of the frames.
        lengths: (B,) valid frames.
        prompts: (B, P) tokens before the texts.
        confidence: Whether labels get a confidence.
        times: Whether labels get the frames of their attention.
        temperature: 0 for the likeliest tokens.
    """
    choose = likeliest
    if temperature:
        choose = Sampler(temperature, torch.Generator(prompts.device).manual_seed(0))
    limits = limits_of(model, lengths, prompts.shape[1], None)
    loop = GreedyLoop(
        model,
        memory,
        prompts,
        limits,
        lengths > 0,
        confidence=confidence,
        attended=times,
        choose=choose,
    )
    loop.run()
    found = loop.hypotheses("attention")
    if loop.attended is None:
        return found
    frames = frames_of_turns(model, memory, lengths, found.labels, loop.attended)
    return replace(found, frames=frames)


def prompts_of(notes: Mapping[str, Any], given: dict[str, Any]) -> dict[str, list[int]]:
    """The prompt of each language that a recording may have: the one given, or all languages.

    A translation of English is a transcription, which is the task in the prompt of English.
    """
    format_ = PromptFormat.from_notes(notes)
    assert format_ is not None
    if "language" in given or len(format_.languages) == 1:
        return {given.get("language", ENGLISH): format_.tokens(**given)}
    prompts = {}
    for code in format_.languages:
        options = given | {"language": code}
        if code == ENGLISH:
            options.pop("task", None)
        prompts[code] = format_.tokens(**options)
    return prompts


@torch.inference_mode(False)
def replaced(found: Hypotheses, rows: Tensor, other: Hypotheses, picked: Tensor) -> Hypotheses:
    """The hypotheses with the picked rows of `other`, (m,) bool, in place of these rows (n,)."""
    N = max(found.labels.shape[1], other.labels.shape[1])
    parts: dict[str, Any] = {}
    for name in ("labels", "frames", "durations", "confidence", "lengths", "scores", "ended"):
        before, after = getattr(found, name), getattr(other, name)
        if before is None:
            continue
        if before.dim() == 2:
            before, after = (
                pad(part, (0, N - part.shape[1]), value=PADDING) for part in (before, after)
            )
        parts[name] = before.index_copy(0, rows, after[picked])
    return replace(found, **parts)


def whole_segments(
    tokens: Sequence[int], no_times: int, T: int
) -> tuple[tuple[Segment, ...], bool]:
    """The whole segments of a text, and whether another one begins after them.

    A whole segment is between two timestamps. A text without one is a segment up to the end of the
    window.

    Args:
        tokens: A text with timestamps.
        no_times: The token before the first timestamp.
        T: Frames of the window.
    """
    segments = []
    labels = 0
    begins = False  # whether a second timestamp starts a segment
    for token in tokens:
        if token <= no_times:
            labels += 1
            continue
        time = token - no_times - 1
        begins = not labels
        if labels:
            segments.append(Segment(labels, time))
        labels = 0
    if labels and not segments:
        return (Segment(labels, T),), False
    return tuple(segments), begins or labels > 0


@torch.inference_mode(False)
def within_segments(found: Hypotheses, no_times: int, T: int) -> Hypotheses:
    """The hypotheses with each label on a frame between the timestamps around it.

    Labels without frames are spread evenly between these, at most SLOWEST frames apart.

    Args:
        found: Texts with timestamps, whose unit is a frame.
        no_times: The token before the first timestamp.
        T: Frames of a window.
    """
    times = found.labels - no_times - 1
    is_time = times >= 0
    start = times.clamp(min=0).cummax(1).values
    end = times.where(is_time, T).flip(1).cummin(1).values.flip(1)
    latest = torch.maximum(end - 1, start)
    places = torch.arange(times.shape[1], device=times.device).expand_as(times)
    last = places.where(is_time, -1).cummax(1).values  # the timestamp before each label
    following = places.where(is_time, found.lengths[:, None]).flip(1).cummin(1).values.flip(1)
    step = (end - start) / (following - last - 1).clamp(min=1)
    spread = (start + (places - last - 1) * step.clamp(max=SLOWEST)).long()
    frames = found.frames.where(found.frames >= 0, spread)
    frames = torch.minimum(torch.maximum(frames, start), latest)
    return replace(found, frames=frames.where(found.labels >= 0, PADDING))
