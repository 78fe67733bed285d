"""Whisper's decoding (arXiv 2212.04356, section 4.5): it finds the language, writes the times of
segments, and decodes windows whose text is unlikely again.
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
from asrkit.decoders.attention.greedy import GreedyLoop
from asrkit.decoders.attention.protocol import limits_of
from asrkit.decoders.hypotheses import PADDING, Segment, Segments
from asrkit.decoders.states import map_state
from asrkit.devices import CPU_FLOAT
from asrkit.models import AEDModel
from asrkit.models.prompts import ENGLISH, SUPPRESSED, WHISPER, PromptFormat
from asrkit.threads import eager
from asrkit.transcribe.decoding import DecodeOptions, by_beam, timed_by_attention, with_texts
from asrkit.transcribe.options import PromptOptions

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)  # of the tries behind the first one
LEAST_LOG_PROB = -1.0  # nats a token in the mean, the end included; a text below is tried again
NONSENSE = -2.0  # nats a token in the mean; a text below is worse than a repetition
MOST_COMPRESSED = 2.4  # times; a text that zlib makes shorter is a repetition, and is tried again
SLOWEST = 25  # frames of a label, half a second, where its place is not known
NO_SPEECH = 0.6  # probability from which a window of an unlikely text has none


class WhisperDecoder:
    """What a Whisper's encoded frames become.

    Args:
        model: In evaluation mode.
        notes: Of its checkpoint.
        tokenizer: Of the model.
        asked: What it is asked for.

    Raises:
        ValueError: The model cannot be asked for that, or the notes name tokens that it has not.
    """

    def __init__(
        self, model: AEDModel, notes: Mapping[str, Any], tokenizer: Any, asked: PromptOptions
    ) -> None:
        given = asked.given()
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
        """Whether it finds the language itself."""
        return len(self.prompts) > 1

    @eager
    def __call__(self, frames: Tensor, lengths: Tensor, options: DecodeOptions) -> Hypotheses:
        """Hypotheses of encoded frames (B, T, D) and lengths (B,), with their languages."""
        memory = self.model.remember(frames, lengths)
        languages = self._languages(memory, options.languages or [""] * len(frames))
        model: Suppressing = self.plain
        remembered: Any = memory
        if options.timestamps:
            until = torch.tensor(options.until or [0] * len(frames), device=frames.device)
            model, remembered = self.timed, TimedMemory(memory, until)
        prompts = self._prompts(languages, options).to(frames.device)
        model.prompt_tokens = prompts.shape[1]
        options = options._replace(prompt=prompts)
        decode = partial(greedy, model, confidence=options.confidence)
        if options.search is not None:
            found = by_beam(model, frames, lengths, options)
        else:
            found = decode(remembered, lengths, prompts)
        drawn_at = torch.zeros(len(frames), **CPU_FLOAT)
        if self.tries_again:
            inputs = (remembered, lengths, prompts)
            found = self._try_again(found, decode, inputs, memory, drawn_at)
        if options.times:
            found = timed_by_attention(self.model, frames, lengths, found, options, memory)
        segments = None
        if options.timestamps:
            segments = self._segments(found, lengths, drawn_at)
            found = within_segments(found, self.no_times, frames.shape[1])
        return replace(with_texts(found, options), languages=tuple(languages), segments=segments)

    def _prompts(self, languages: Sequence[str], options: DecodeOptions) -> Tensor:
        """The prompts (B, P), those of one batch of the same length."""
        prompts = [self.prompts[code] for code in languages]
        if options.timestamps:
            prompts = [prompt[:-1] for prompt in prompts]  # all but <|notimestamps|>
        if options.previous:
            begins = self.no_times - 2  # <|startofprev|>; no speech is between the two
            most = (self.model.most - 1) // 2
            pairs = zip(options.previous, prompts, strict=True)
            prompts = [
                [begins, *before[1 - most :], *prompt] if before else prompt
                for before, prompt in pairs
            ]
        return torch.tensor(prompts, device="cpu")

    def _segments(
        self, found: Hypotheses, lengths: Tensor, drawn_at: Tensor
    ) -> tuple[Segments, ...]:
        """The segments of each text."""
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
        """Probabilities (B, V) of what follows <|startoftranscript|>: a language, or no speech."""
        start = memory.mask.new_full((len(memory.mask), 1), self.model.bos, dtype=torch.int64)
        logits, _ = self.model.follow(start, self.model.begin(memory, 1), memory, reach=1)
        return logits[:, 0].softmax(1, dtype=torch.float32)

    def _languages(self, memory: Any, known: Sequence[str]) -> list[str]:
        """The language of each utterance: the likeliest one where it is not known."""
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
        """The texts, those that fail replaced by draws, and none where there is no speech.

        Args:
            found: The likeliest texts.
            decode: Of memory, lengths and prompts at a temperature.
            inputs: These three.
            memory: What the model itself remembers.
            drawn_at: (B,), where the temperature of each draw is written.
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
        return found.only(~silent[:, None])

    def _better(self, drawn: Hypotheses, found: Hypotheses, rows: Tensor) -> Tensor:
        """Which of the texts drawn for these rows are better than those found: no repetitions in
        place of repetitions, unless they are nonsense, or else likelier ones.
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
    temperature: float = 0.0,
) -> Hypotheses:
    """Texts of what the model remembers: the likeliest tokens, or tokens drawn at a temperature."""
    loop = GreedyLoop(
        model,
        memory,
        prompts=prompts,
        limits=limits_of(model, lengths, prompts.shape[1], None),
        heard=lengths > 0,
        drafted=0,
        confidence=confidence,
        temperature=temperature,
    )
    loop.turn(prompts)
    loop.run()
    return loop.texts("attention")


def prompts_of(notes: Mapping[str, Any], given: dict[str, Any]) -> dict[str, list[int]]:
    """The prompt of each language that a recording may have: the one given, or all.

    What is found to be English is transcribed where a translation is asked for, which is the same.
    """
    format_ = PromptFormat.from_notes(notes)
    assert format_ is not None
    if "language" in given or len(format_.languages) == 1:
        return {given.get("language", ENGLISH): format_.tokens(**given)}
    prompts = {}
    for code in format_.languages:
        asked = given | {"language": code}
        if code == ENGLISH:
            asked.pop("task", None)
        prompts[code] = format_.tokens(**asked)
    return prompts


@torch.inference_mode(False)
def replaced(found: Hypotheses, rows: Tensor, other: Hypotheses, picked: Tensor) -> Hypotheses:
    """The hypotheses with those of `other` that are picked, (m,) bool, in these rows (n,)."""
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
    """The whole segments of a text, those between two timestamps, and whether another one begins.

    A text without any such segment is one, up to the end of the window.

    Args:
        tokens: Of a text with timestamps.
        no_times: Token before the first of them.
        T: Frames of the window.
    """
    segments = []
    labels = 0
    begins = False  # behind a second timestamp
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
    """The labels on frames between the timestamps around them: they begin and end in between.

    Labels that have no frames yet are spread evenly between these, at most SLOWEST frames apart.

    Args:
        found: With timestamps, whose steps are frames.
        no_times: Token before the first of them.
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
