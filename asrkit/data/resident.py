"""Log-mel features of a whole set, computed once and held on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asrkit.features import FeatureConfig, frame_lengths, log_mel
from asrkit.shapes import expect, valid_mask

BATCH_SAMPLES = 16_000 * 600  # computed at once: ten minutes of speech, 37 MiB


@dataclass(frozen=True, kw_only=True)
class ResidentFeatures:
    """Features of N utterances, one after the other in one tensor.

    A batch is a gather on the device: no audio is moved and no feature computed. An hour of speech
    takes 110 MiB at 80 bins. The waveforms can no longer be augmented; spectrograms can.

    Attributes:
        frames: Features of all utterances (sum of lengths, F) float32, on the device.
        lengths: Frames of each utterance (N,) int64, on the host.
        starts: Where in `frames` each utterance begins, (N,) int64, on the host.
    """

    frames: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def of_waveforms(
        cls, waveforms: Sequence[Tensor], config: FeatureConfig, device: str | torch.device
    ) -> "ResidentFeatures":
        """Compute and hold the features of all waveforms.

        Args:
            waveforms: At least one, (S,) int16 each, at the rate of `config`.
            config: Log-mel settings.
            device: Where the features are computed and held.
        """
        expect(len(waveforms) > 0, "utterances", "at least one", "none")
        samples = torch.tensor([len(waveform) for waveform in waveforms])
        lengths = frame_lengths(samples, config)
        starts = lengths.cumsum(0) - lengths
        frames = torch.empty(int(lengths.sum()), config.bins, device=device)
        for rows in _batches_by_length(samples.numpy()):
            padded = torch.nn.utils.rnn.pad_sequence(
                [waveforms[row] for row in rows], batch_first=True
            )
            scaled = padded.to(device).float() / 32768
            features, _ = log_mel(scaled, samples[rows].to(device), config=config)
            for row, of_utterance in zip(rows.tolist(), features, strict=True):
                start = int(starts[row])
                T = int(lengths[row])
                frames[start : start + T] = of_utterance[:T]
        return cls(frames=frames, lengths=lengths, starts=starts)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Sequence[int] | np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, T, F) on the device, zero in the padding, and lengths (B,) on the host.

        Args:
            rows: Numbers of the utterances.
        """
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        N = len(self)
        fits = chosen.ndim == 1 and len(chosen) > 0
        fits = fits and bool(((chosen >= 0) & (chosen < N)).all())
        expect(fits, "rows", f"numbers of utterances, 0 to {N - 1}", chosen.tolist())
        device = self.frames.device
        lengths = self.lengths[chosen]
        T = int(lengths.max())
        starts = self.starts[chosen].to(device, non_blocking=True)
        valid = valid_mask(lengths.to(device, non_blocking=True), T)
        positions = starts[:, None] + torch.arange(T, device=device)
        positions = positions.masked_fill(~valid, 0)
        features = self.frames[positions]  # (B, T, F)
        return features.masked_fill(~valid[..., None], 0.0), lengths


def _batches_by_length(samples: np.ndarray) -> list[np.ndarray]:
    """Row numbers, the longest first, in batches of at most BATCH_SAMPLES with their padding."""
    order = np.argsort(-samples, kind="stable")
    batches = []
    first = 0
    while first < len(order):
        longest = int(samples[order[first]])
        size = max(1, BATCH_SAMPLES // longest)
        batches.append(order[first : first + size])
        first += size
    return batches
