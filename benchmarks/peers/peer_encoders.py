"""FastConformer encoders of NeMo and transformers; see peer_worker.py.

A request names a file that `write` wrote (weights and sizes of asrkit's encoder, and features),
and a mode: float32, autocast (float32 weights, products in bfloat16) or bfloat16. Encoders run in
eval mode. The answer has a sketch of the frames, and their lengths.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Result = tuple[Tensor, Tensor]  # frames (B, T', D), lengths (B,)
Encode = Callable[[Tensor, Tensor], Result]  # takes features (B, T, F) and lengths (B,)


def write(path: Path, encoder: Any, features: Tensor, lengths: Tensor) -> None:
    """Write the weights and the batch that a peer encodes; called by asrkit's side.

    Args:
        path: file to write.
        encoder: our encoder.
        features: (B, T, F).
        lengths: (B,).
    """
    plan = {
        "weights": encoder.state_dict(prefix="encoder."),
        "sizes": asdict(encoder.config),
        "features": features,
        "lengths": lengths,
    }
    torch.save(plan, path)


def sketch(encoded: Tensor, lengths: Tensor) -> Tensor:
    """Eight columns and the norm of every frame, (B, T, 9) in float32, with padding as 0: enough to
    recognise the frames.
    """
    columns = encoded[..., :: max(encoded.shape[-1] // 8, 1)][..., :8].float()
    norms = encoded.float().norm(dim=-1, keepdim=True)
    sketched = torch.cat([columns, norms], -1)
    frames = torch.arange(encoded.shape[1], device=encoded.device)
    valid = frames < lengths[:, None]
    return sketched * valid[..., None]


def load(
    module: nn.Module, prefix: str, our_name: Callable[[str], str], weights: Mapping[str, Tensor]
) -> None:
    """Copy asrkit's weights into a peer's module.

    Args:
        module: all its weights are overwritten, except tables of positions.
        prefix: prefix of its names in the peer's checkpoints.
        our_name: maps a name in such a checkpoint to asrkit's name.
        weights: weights by asrkit's names.

    Raises:
        KeyError: the module has a weight that asrkit's model lacks.
    """
    for name, weight in module.state_dict().items():
        if name.endswith((".inv_freq", "pos_enc.pe")):
            continue
        ours = our_name(prefix + name)
        joined, part = re.subn(r"\.attention\.[qkv]\.", ".attention.qkv.", ours)
        value = weights[joined]
        if part:  # asrkit has one layer for all three
            value = value.chunk(3)["qkv".index(ours.rpartition(".attention.")[2][0])]
        weight.copy_(value.reshape(weight.shape))  # their convolution may be our linear layer


def nemo_settings(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of NeMo's ConformerEncoder, as in its FastConformer checkpoints."""
    return {
        "feat_in": sizes["bins"],
        "n_layers": sizes["layers"],
        "d_model": sizes["width"],
        "subsampling": "dw_striding",
        "subsampling_factor": sizes["subsampling"],
        "subsampling_conv_channels": sizes["subsampling_channels"],
        "ff_expansion_factor": sizes["expansion"],
        "n_heads": sizes["heads"],
        "att_context_size": [-1, -1],
        "xscaling": sizes["scale_input"],
        "conv_kernel_size": sizes["kernel"],
        "use_bias": sizes["bias"],
    }


def transformers_settings(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of transformers' ParakeetEncoderConfig."""
    return {
        "hidden_size": sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "intermediate_size": sizes["width"] * sizes["expansion"],
        "attention_bias": sizes["bias"],
        "convolution_bias": sizes["bias"],
        "conv_kernel_size": sizes["kernel"],
        "subsampling_factor": sizes["subsampling"],
        "num_mel_bins": sizes["bins"],
        "subsampling_conv_channels": sizes["subsampling_channels"],
        "scale_input": sizes["scale_input"],
    }


def nemo(sizes: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[nn.Module, Encode]:
    """NeMo's ConformerEncoder with the settings of its FastConformer checkpoints."""
    from asrkit.models.checkpoints.nemo import our_name
    from benchmarks.peers.nemo_stubs import stub_nemo

    stub_nemo()
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    encoder = ConformerEncoder(**nemo_settings(sizes))
    load(encoder, "encoder.", our_name, weights)

    def encode(features: Tensor, lengths: Tensor) -> Result:
        encoded, lengths = encoder(audio_signal=features.transpose(1, 2), length=lengths)
        return encoded.transpose(1, 2), lengths

    return encoder, encode


def transformers(
    sizes: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[nn.Module, Encode]:
    """transformers' ParakeetEncoder with `sdpa` attention."""
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    from asrkit.models.checkpoints.huggingface import our_name

    config = ParakeetEncoderConfig(**transformers_settings(sizes))
    config._attn_implementation = "sdpa"
    encoder = ParakeetEncoder(config)
    load(encoder, "encoder.", our_name, weights)

    def encode(features: Tensor, lengths: Tensor) -> Result:
        mask = torch.arange(features.shape[1]) < lengths[:, None]
        output = encoder(features, attention_mask=mask)
        return output.last_hidden_state, output.attention_mask.sum(-1)

    return encoder, encode


def prepare(
    make: Callable[..., tuple[nn.Module, Encode]], plan: str, mode: str
) -> tuple[Callable[[], Result], Callable[[Result], dict[str, Any]]]:
    """The call of an encoder, and the function that makes an answer of its frames.

    Args:
        make: `nemo` or `transformers`.
        plan: path of the file that `write` wrote.
        mode: "float32", "autocast" or "bfloat16".
    """
    batch = torch.load(plan)
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    encoder, encode = make(batch["sizes"], batch["weights"])
    encoder.eval().requires_grad_(False).to(dtype)
    features = batch["features"].to(dtype)
    lengths = batch["lengths"]

    def call() -> Result:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
        with torch.inference_mode(), autocast:
            return encode(features, lengths)

    return call, answer


def answer(result: Result) -> dict[str, Any]:
    """A sketch of the frames, and their lengths."""
    encoded, lengths = result
    return {"digest": [sketch(encoded, lengths).tolist(), lengths.tolist()]}


PEERS = {
    "nemo_encoder": ("nemo_toolkit", partial(prepare, nemo)),
    "transformers_encoder": ("transformers", partial(prepare, transformers)),
}
