"""Exported folders as checkpoints whose encoder runs in an inference engine; decoders stay ours."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.export import Engine, Exported, open_engine, read_exported
from asrkit.export.folder import DECODING
from asrkit.models import Checkpoint, CTCConfig, CTCModel, TransducerModel
from asrkit.shapes import expect, valid_mask


class EngineEncoder(nn.Module):
    """An encoder that an engine computes, or an encoder with its CTC head.

    `digest` stands for the weights, so that a folder of transcripts knows which model made them.

    Args:
        engine: Takes features (B, F, T) and lengths.
        digest: Of the engine, its precision and its file.
        time_last: Whether frames come as (B, D, T').
    """

    def __init__(self, engine: Engine, digest: bytes, *, time_last: bool) -> None:
        super().__init__()
        self.engine = engine
        self.time_last = time_last
        self.register_buffer("digest", torch.tensor([*digest], dtype=torch.uint8))
        # A recogniser asks the parameters of a model for its dtype and device.
        self.frames_like = nn.Parameter(torch.zeros(0), requires_grad=False)

    def __deepcopy__(self, memo: Any) -> "EngineEncoder":
        """Itself: an engine cannot be copied, and nothing changes it."""
        return self

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T', D) of features (B, T, F), NaN where these are not finite; lengths (B,)."""
        signal = features.transpose(1, 2).contiguous()
        frames, frame_lengths = self.engine(signal.numpy(), lengths.numpy())
        encoded = torch.from_numpy(frames)
        if self.time_last:
            encoded = encoded.transpose(1, 2)
        # An engine may make numbers of NaN; torch keeps it, and so the utterance is an error.
        unsound = features.isfinite().all(2).logical_not()  # (B, T)
        unsound &= valid_mask(lengths, features.shape[1])
        encoded = encoded.masked_fill(unsound.any(1)[:, None, None], torch.nan)
        return encoded, torch.from_numpy(frame_lengths)


def load_exported(
    path: Path | str, engine: str, *, threads: int | None = None, precision: str = "float32"
) -> Checkpoint:
    """The checkpoint of an exported folder, to transcribe with.

    Its encoder, and the CTC head of a CTC model, run in the engine; predictor, joint and decoders
    are asrkit's. Of a transducer that left with its CTC head the checkpoint is a CTC model.

    Args:
        path: A folder of `asrkit.export.export`.
        engine: "onnxruntime" or "openvino".
        threads: Threads that compute; None: as many as torch has.
        precision: "float32", or "bfloat16" for OpenVINO.

    Raises:
        ValueError: The folder is incomplete, or the engine cannot run it; see `open_engine`.
    """
    exported = read_exported(path)
    runs = open_engine(exported, engine, threads=threads, precision=precision)
    made_by = [engine, precision, exported.files[exported.graphs[exported.acoustic]]]
    digest = hashlib.sha256(" ".join(made_by).encode()).digest()
    on_ctc = exported.head == "ctc"
    encoder = EngineEncoder(runs, digest, time_last=not on_ctc)
    if on_ctc:
        model: Any = _ctc_model(exported, encoder)
    else:
        model = _transducer(exported, encoder)
    return Checkpoint(model.eval(), exported.tokenizer, exported.features, exported.notes)


def _ctc_model(exported: Exported, encoder: nn.Module) -> CTCModel:
    """A CTC model whose encoder returns log-probabilities, of which those are themselves."""
    config = exported.config
    with torch.device("meta"):
        model = CTCModel(CTCConfig(vocab_size=config.vocab_size, encoder=config.encoder))
    model.encoder = encoder  # type: ignore[assignment]
    model.output = nn.Identity()  # type: ignore[assignment]
    return model


def _transducer(exported: Exported, encoder: nn.Module) -> TransducerModel:
    """A transducer with the weights of its decoding, and this encoder."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = TransducerModel(exported.config)
    model.encoder = nn.Identity()  # type: ignore[assignment]
    model.ctc_head = None
    file = exported.path / DECODING
    try:
        model.load_state_dict(load_file(str(file)), assign=True)
    except (RuntimeError, SafetensorError, OSError) as error:
        why = " ".join(str(error).split())
        expect(False, "model", f"weights of its config in {file.name}", f"others ({why:.200})")
    model.encoder = encoder  # type: ignore[assignment]
    return model.requires_grad_(False)
