"""Speech in memory, and padded batches of its waveforms and targets.

LengthSampler is for cuts that are read during training.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import at_most_seconds
from asrkit.data.batching.strategies import cut
from asrkit.shapes import expect
from asrkit.sound_files import Sound, mean_of_channels
from asrkit.sound_readers import MIN_MISSING_S, expect_not_cut, open_sound
from asrkit.text import Tokenizer

RATE_HZ = 16_000  # sample rate of all waveforms in asrkit.data
FULL_SCALE = 32768  # of int16
MAX_PEAK = 8.0  # largest sample: resampling and mixing may give a little more than 1
ROUNDING_S = 0.02  # more than the rounding of times in manifests


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B padded utterances; zero beyond their lengths.

    Attributes:
        waveforms: (B, S) float32 in -1..1, at 16 kHz.
        sample_lengths: (B,) int64.
        targets: (B, U) int64.
        target_lengths: (B,) int64.
        texts: Text of each utterance.
        ids: Id of each utterance.
    """

    waveforms: Tensor
    sample_lengths: Tensor
    targets: Tensor
    target_lengths: Tensor
    texts: list[str]
    ids: list[str]


@dataclass(frozen=True, kw_only=True)
class Utterances:
    """Speech in memory: one waveform, id, text and speaker for each utterance."""

    waveforms: Sequence[Tensor]  # (S,) int16, 16 kHz
    ids: Sequence[str]
    texts: Sequence[str]
    speakers: Sequence[str]

    @classmethod
    def load(cls, cuts: Iterable[Any], *, progress: bool = True) -> "Utterances":
        """Read lhotse cuts into memory, in their order.

        Args:
            cuts: Cuts with text, at 16 kHz; channels are averaged.
            progress: Show a progress bar.

        Raises:
            ValueError: A cut cannot be read, ends after its sound, or has text outside of it. The
                message names the cut.
        """
        from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

        cuts = list(cuts)
        with ThreadPoolExecutor() as pool:
            read = pool.map(_read_samples, cuts)
            bar = tqdm(read, "reading speech", len(cuts), unit="utt", disable=not progress)
            waveforms = list(bar)
        spoken = [sorted(cut.supervisions, key=lambda part: part.start) for cut in cuts]
        return cls(
            waveforms=waveforms,
            ids=[cut.id for cut in cuts],
            texts=[" ".join(part.text for part in parts if part.text) for parts in spoken],
            speakers=[str(parts[0].speaker) if parts else "" for parts in spoken],
        )

    def __post_init__(self) -> None:
        sizes = (len(self.waveforms), len(self.ids), len(self.texts), len(self.speakers))
        expect(len(set(sizes)) == 1, "waveforms, ids, texts, speakers", "equally many", sizes)
        repeated = Counter(self.ids) - Counter(set(self.ids))
        expect(
            not repeated,
            "ids",
            "all different",
            f"{[*repeated][:3]} several times",
            "Repeat cuts by cuts.repeat(times, preserve_id=False).",
        )

    def __len__(self) -> int:
        return len(self.waveforms)

    @property
    def durations(self) -> list[float]:
        """Seconds of each utterance."""
        return [len(waveform) / RATE_HZ for waveform in self.waveforms]

    @property
    def total_seconds(self) -> float:
        """Seconds of all utterances together."""
        return sum(self.durations)

    def select(self, rows: Iterable[int]) -> "Utterances":
        """Some of the utterances, in the order of `rows`; the waveforms are shared.

        Args:
            rows: Row numbers.
        """
        rows = list(rows)
        columns = {name: [values[row] for row in rows] for name, values in vars(self).items()}
        return Utterances(**columns)

    def batch(self, rows: Iterable[int], tokenizer: Tokenizer) -> Batch:
        """Some of the utterances as a padded batch.

        Args:
            rows: Row numbers.
            tokenizer: Encodes texts as targets.
        """
        rows = list(rows)
        waveforms = [self.waveforms[row] for row in rows]
        texts = [self.texts[row] for row in rows]
        targets = [
            torch.tensor(tokenizer.encode(text), dtype=torch.int64, device="cpu") for text in texts
        ]
        return Batch(
            waveforms=pad_sequence(waveforms, batch_first=True).float() / FULL_SCALE,
            sample_lengths=torch.tensor([len(waveform) for waveform in waveforms], device="cpu"),
            targets=pad_sequence(targets, batch_first=True),
            target_lengths=torch.tensor([len(target) for target in targets], device="cpu"),
            texts=texts,
            ids=[self.ids[row] for row in rows],
        )


def _read_samples(cut: Any) -> Tensor:
    """Samples of a cut, (S,) int16, the mean of its channels."""
    got = f"{cut.sampling_rate} Hz in {cut.id!r}"
    expect(cut.sampling_rate == RATE_HZ, "cuts", "16 kHz", got, "Call cuts.resample(16000).")
    try:
        expect_valid(cut)
        for track, sound in _sources(cut):
            _expect_sound(track, sound)
        # not by lhotse's downmix, which sums the channels and repeats the text
        channels = torch.from_numpy(cut.load_audio())
    except Exception as error:  # lhotse wraps errors of decoders in classes of several modules
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"cuts: {cut.id!r} cannot be read ({why}).") from None
    peak = float(channels.abs().max())
    expect(math.isfinite(peak), "cuts", "finite samples", f"NaN or infinity in {cut.id!r}")
    remedy = "Divide integer samples by 32768."
    expect(peak <= MAX_PEAK, "cuts", "samples in -1..1", f"{peak:.0f} in {cut.id!r}", remedy)
    expect(peak > 0, "cuts", "sound", f"only zeros in {cut.id!r}", "Leave it out.")
    mono, _ = mean_of_channels(channels.T, RATE_HZ)
    return (mono * FULL_SCALE).round().clamp(-FULL_SCALE, FULL_SCALE - 1).to(torch.int16)


def expect_valid(cut: Any) -> None:
    """Check a lhotse cut by lhotse's `validate`, and that all text is within the sound of its own
    track, channel and recording. No audio is read.

    Raises:
        AssertionError: lhotse's check fails; the message has the id.
        ValueError: Our check fails; the message has the id.
    """
    from lhotse.qa import validate

    validate(cut.drop_supervisions())
    remedy = "Cut by trim_to_supervisions(keep_overlapping=False), or remove such supervisions."
    for track in _tracks(cut):
        for part in (part for part in track.supervisions if part.text):
            merged = part.recording_id.startswith("cat#")  # across tracks, by merge_supervisions
            seconds = cut.duration if merged else track.duration
            inside = part.start >= -ROUNDING_S and part.end <= seconds + ROUNDING_S
            wanted = f"supervisions within the {seconds} s of {cut.id!r}"
            got = f"{part.start} to {part.end} s in {part.id!r}"
            expect(inside, "manifest", wanted, got, remedy)
            own = part.recording_id == track.recording_id and _channels(part) <= _channels(track)
            wanted = f"supervisions of the recording and channels of {cut.id!r}"
            got = f"{part.recording_id!r}, channel {part.channel}, in {part.id!r}"
            expect(merged or own, "manifest", wanted, got)


def sound_paths(cut: Any) -> Iterator[Path]:
    """Yield the sound files that a lhotse cut uses, whole or in part."""
    return (sound.path for _, sound in _sources(cut) if sound.data is None)


def _tracks(cut: Any) -> list[Any]:
    """The cuts that a lhotse cut mixes, without padding; the cut itself if it mixes none."""
    parts = [getattr(track, "cut", track) for track in getattr(cut, "tracks", [cut])]
    return [part for part in parts if hasattr(part, "recording")]


def _channels(part: Any) -> set[int]:
    return {*part.channel} if isinstance(part.channel, list) else {part.channel}


def _sources(cut: Any) -> Iterator[tuple[Any, Sound]]:
    """Yield (track, sound) for each sound that a lhotse cut reads from a file or from memory."""
    for track in _tracks(cut):
        for source in track.recording.sources if track.recording else []:
            if _channels(track) & {*source.channels}:
                if source.type == "file":
                    yield track, Sound(Path(source.source))
                if source.type == "memory":
                    yield track, Sound(Path(track.id), source.source)


def _expect_sound(track: Any, sound: Sound) -> None:
    """ValueError for a sound that is truncated or ends before the track.

    lhotse would read the part that exists, and mirror up to half a second of it.
    """
    from lhotse.augmentation import AudioTransform

    end_s = track.end
    for change in track.recording.to_dict().get("transforms", []):
        _, end_s = AudioTransform.from_dict(change).reverse_timestamps(
            0.0, end_s, track.sampling_rate
        )
    with open_sound(sound) as file:
        expect_not_cut(not file.missing_s, sound.path)
        sound_s = file.frames / file.rate_hz
    wanted = f"a cut within the {sound_s} s of {sound.path}"
    expect(end_s < sound_s + MIN_MISSING_S, "manifest", wanted, f"{end_s} s")


def batches(
    utterances: Utterances, tokenizer: Tokenizer, *, batch_seconds: float
) -> Iterator[Batch]:
    """Every utterance once, in padded batches that begin with the longest one.

    Args:
        utterances: Speech in memory.
        tokenizer: Encodes texts as targets.
        batch_seconds: Most seconds of a batch, padding included. A longer utterance is a batch by
            itself.
    """
    expect(batch_seconds > 0, "batch_seconds", "> 0", batch_seconds)
    samples = np.array([len(waveform) for waveform in utterances.waveforms])
    lengths = Lengths(samples, np.zeros(len(samples)))  # whole numbers, so that limits are exact
    rows = np.argsort(-samples, kind="stable")
    for batch_rows in cut(rows, lengths, at_most_seconds(batch_seconds * RATE_HZ)):
        yield utterances.batch(batch_rows, tokenizer)
