"""How the next token is chosen from logits: the likeliest one, or one drawn at a temperature."""

from dataclasses import dataclass

import torch
from torch import Tensor


def _log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities in float32 or float64."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of logits (..., V).

    Returns:
        Tokens (...,) int64, and their log-probabilities (...,) float32 in nats: NaN where a logit
        is NaN.
    """
    scores = _log_probs(logits)
    if scores.device.type == "cpu":  # NumPy takes a tenth of torch's time
        token = torch.as_tensor(scores.detach().numpy().argmax(-1), device="cpu")
    else:
        token = scores.argmax(-1)
    return token, scores.gather(-1, token[..., None])[..., 0].float()


@dataclass(frozen=True)
class Sampler:
    """Draws tokens at a temperature.

    All rows share the noise, so the token of one row does not depend on the other rows.
    """

    temperature: float
    noise: torch.Generator

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `likeliest`, of logits (n, K, V); log-probabilities are those at temperature 1."""
        scores = _log_probs(logits)
        shares = (scores / self.temperature).softmax(-1)
        noise = torch.empty_like(shares[:1]).exponential_(generator=self.noise)
        token = (shares / noise).argmax(-1)
        return token, scores.gather(-1, token[..., None])[..., 0].float()
