"""`Suppressing`: a model that never writes certain tokens, whatever decodes it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.decoders.attention.steps import check_model
from asrkit.shapes import expect, whole


class Suppressing(nn.Module):
    """An `Attention` with the logits of another one, but for tokens that it is not to write.

    Their logits are half the lowest number of the dtype, so their probability is 0. Whisper's
    published settings name such tokens: signs that are no speech, and as a text's first token a
    space and the end. Greedy decoding, beams and drafts take it like any other model.

    Args:
        model: An `Attention`; its weights are shared.
        always: Tokens that are never written.
        first: Tokens that no text begins with.
        prompt_tokens: Tokens of the prompt, P, behind which a text begins.

    Raises:
        ValueError: The model does not follow the protocol, or has no such token.

    >>> from asrkit.models import AEDModel, presets
    >>> quiet = Suppressing(AEDModel(presets.tiny_aed()), always=[7], first=[1], prompt_tokens=1)
    """

    def __init__(
        self, model: Any, *, always: Sequence[int], first: Sequence[int], prompt_tokens: int
    ) -> None:
        super().__init__()
        check_model(model)
        V = model.vocab_size
        for name, tokens in (("always", always), ("first", first)):
            listed = isinstance(tokens, Sequence)  # notes of a checkpoint may be damaged
            inside = listed and all(whole(token, 0, V - 1) for token in tokens)
            expect(inside, name, f"tokens from 0 to below V={V}", repr(tokens)[:80])
        self.model = model
        self.bos = model.bos
        self.eos = model.eos
        self.most = model.most
        self.vocab_size = V
        self.prompt_tokens = prompt_tokens
        device = next(model.parameters()).device
        self.register_buffer("never", _marked(always, V).to(device))
        self.register_buffer("not_first", _marked(first, V).to(device))
        self.train(model.training)

    @property
    def encoder_projection(self) -> Any:
        """What leads from the encoder's frames to those of `remember`, of an AEDModel."""
        return self.model.encoder_projection

    @property
    def ctc_head(self) -> Any:
        """From the encoder's frames to CTC's logits, of an AEDModel; None where it has none."""
        return self.model.ctc_head

    def remember(self, encoded: Tensor, lengths: Tensor, *, cross: Any = "kept") -> Any:
        """What the model keeps of frames (B, T, E) with these lengths (B,)."""
        return self.model.remember(encoded, lengths, cross=cross)

    def begin(self, memory: Any, room: int, *, past: Any = "kept") -> Any:
        """The model's state before the first token."""
        return self.model.begin(memory, room, past=past)

    def looks(self, tokens: Tensor, memory: Any) -> Tensor:
        """(B, U, T): how much the model's heads look at each frame."""
        return self.model.looks(tokens, memory)

    def follow(
        self, tokens: Tensor, state: Any, memory: Any, *, reach: int | None = None
    ) -> tuple[Tensor, Any]:
        """The model's logits (B, K, V), those of suppressed tokens lowered, and its new state."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        places = state.place[:, None] + steps  # (B, K); the first text token follows place P - 1
        logits, after = self.model.follow(tokens, state, memory, reach=reach)
        begins = (places == self.prompt_tokens - 1)[..., None]
        suppressed = self.never | (begins & self.not_first)
        return logits.masked_fill(suppressed, torch.finfo(logits.dtype).min / 2), after


def _marked(tokens: Sequence[int], V: int) -> Tensor:
    """(V,) bool, True for the tokens."""
    marks = torch.zeros(V, dtype=torch.bool)
    marks[torch.tensor([*tokens], dtype=torch.int64)] = True
    return marks
