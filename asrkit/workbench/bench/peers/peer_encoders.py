"""FastConformer encoders of NeMo and transformers; see peer_worker.py.

A request names a file that `write` made, the weights of asrkit's encoder under the peers' names,
its sizes, and features, and a mode: float32, autocast (float32 weights, products in bfloat16) or
bfloat16 (all of it). Encoders run in eval mode. The answer has a sketch of the frames, and their
lengths. transformers is asked for its `sdpa` attention, and once more for its `eager` one.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIZES = (
    "bins",
    "width",
    "layers",
    "heads",
    "subsampling",
    "subsampling_channels",
    "kernel",
    "expansion",
    "bias",
    "scale_input",
)
Result = tuple[Tensor, Tensor]  # frames (B, T', D), lengths (B,)
Encode = Callable[[Tensor, Tensor], Result]  # of features (B, T, F) and lengths


def write(path: Path, encoder: Any, features: Tensor, lengths: Tensor) -> None:
    """Write what a peer needs to encode the same batch with the same weights; asrkit's side.

    Args:
        path: the file.
        encoder: our encoder.
        features: (B, T, F).
        lengths: (B,).
    """
    weights = encoder.state_dict()
    plan = {
        "weights": {peer: renamed(weights, peer) for peer in ("nemo", "transformers")},
        "sizes": {name: getattr(encoder.config, name) for name in SIZES},
        "features": features,
        "lengths": lengths,
    }
    torch.save(plan, path)  # weights of both peers are views of the same memory, and saved once


def sketch(encoded: Tensor, lengths: Tensor) -> Tensor:
    """Eight columns and the norm of every frame (B, T, 9) in float32, what lies in the padding as
    0: enough to know it by.
    """
    columns = encoded[..., :: max(encoded.shape[-1] // 8, 1)][..., :8].float()
    norms = encoded.float().norm(dim=-1, keepdim=True)
    sketched = torch.cat([columns, norms], -1)
    frames = torch.arange(encoded.shape[1], device=encoded.device)
    valid = frames < lengths[:, None]
    return sketched * valid[..., None]


def renamed(weights: Mapping[str, Tensor], peer: str) -> dict[str, Tensor]:
    """Weights of our encoder by the names and in the shapes of "nemo" or "transformers".

    The names are those by which asrkit.models.checkpoints reads their files, so this is called on
    asrkit's side only.
    """
    name_of = _transformers_name
    if peer == "nemo":
        name_of = _nemo_name
    result: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".qkv." in name:
            for part, rows in zip("qkv", weight.chunk(3), strict=True):
                result[name_of(name.replace(".qkv.", f".{part}."))] = rows
            continue
        if name.endswith("_bias"):
            weight = weight.squeeze(1)  # (H, 1, D/H): ours broadcasts over frames
        if name.endswith((".gate.weight", ".pointwise.weight")):
            weight = weight[..., None]  # a convolution of one frame
        result[name_of(name)] = weight
    return result


def _nemo_name(name: str) -> str:
    from asrkit.models.checkpoints import nemo

    block = re.match(r"blocks\.(\d+)\.", name)
    if block is None:
        return _replaced(f"encoder.{name}", nemo.MODEL_NAMES).removeprefix("encoder.")
    return f"layers.{block[1]}." + _replaced(name[block.end() :], nemo.BLOCK_NAMES)


def _replaced(name: str, ours_of: Mapping[str, str]) -> str:
    """Their name for one of ours, by a table of the beginnings of names."""
    for theirs, ours in ours_of.items():
        if name == ours or name.startswith(f"{ours}."):
            return theirs + name.removeprefix(ours)
    return name


def _transformers_name(name: str) -> str:
    from asrkit.models.checkpoints import huggingface_parakeet

    name = f"encoder.{name}"
    for theirs, ours in huggingface_parakeet.NAMES.items():
        if theirs.startswith(("encoder.", ".")):
            name = name.replace(ours, theirs)
    return name.removeprefix("encoder.")


def nemo(sizes: Mapping[str, Any]) -> tuple[nn.Module, Encode]:
    """NeMo's ConformerEncoder, set up as its FastConformer checkpoints are."""
    from nemo_stubs import stub_nemo

    stub_nemo()
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    encoder = ConformerEncoder(
        feat_in=sizes["bins"],
        n_layers=sizes["layers"],
        d_model=sizes["width"],
        subsampling="dw_striding",
        subsampling_factor=sizes["subsampling"],
        subsampling_conv_channels=sizes["subsampling_channels"],
        ff_expansion_factor=sizes["expansion"],
        n_heads=sizes["heads"],
        att_context_size=[-1, -1],
        xscaling=sizes["scale_input"],
        conv_kernel_size=sizes["kernel"],
        use_bias=sizes["bias"],
    )

    def encode(features: Tensor, lengths: Tensor) -> Result:
        encoded, lengths = encoder(audio_signal=features.transpose(1, 2), length=lengths)
        return encoded.transpose(1, 2), lengths

    return encoder, encode


def transformers(sizes: Mapping[str, Any], attention: str) -> tuple[nn.Module, Encode]:
    """transformers' ParakeetEncoder with "sdpa" or "eager" attention."""
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    config = ParakeetEncoderConfig(
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["width"] * sizes["expansion"],
        attention_bias=sizes["bias"],
        convolution_bias=sizes["bias"],
        conv_kernel_size=sizes["kernel"],
        subsampling_factor=sizes["subsampling"],
        num_mel_bins=sizes["bins"],
        subsampling_conv_channels=sizes["subsampling_channels"],
        scale_input=sizes["scale_input"],
    )
    config._attn_implementation = attention
    encoder = ParakeetEncoder(config)

    def encode(features: Tensor, lengths: Tensor) -> Result:
        mask = torch.arange(features.shape[1]) < lengths[:, None]
        output = encoder(features, attention_mask=mask)
        return output.last_hidden_state, output.attention_mask.sum(-1)

    return encoder, encode


def load(encoder: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give `encoder` these weights, strictly; RuntimeError names what does not fit."""
    missing, unknown = encoder.load_state_dict(weights, strict=False, assign=True)
    made = (".inv_freq", "pos_enc.pe")  # not loaded
    wrong = [name for name in (*missing, *unknown) if not name.endswith(made)]
    if wrong:
        raise RuntimeError(f"its weights have other names: {', '.join(wrong[:4])}")


def prepare(
    peer: str, make: Callable[..., tuple[nn.Module, Encode]], plan: str, mode: str
) -> tuple[Callable[[], Result], Callable[[Result], dict[str, Any]]]:
    """The call of an encoder, and what makes an answer of its frames.

    Args:
        peer: "nemo" or "transformers", whose names the weights get.
        make: of the functions above.
        plan: path of what `write` wrote.
        mode: "float32", "autocast" or "bfloat16".
    """
    # not mapped: weights in the page cache are 5 % faster than those that asrkit made in memory
    batch = torch.load(plan)
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    encoder, encode = make(batch["sizes"])
    load(encoder, batch["weights"][peer])
    encoder.eval().requires_grad_(False).to(dtype)
    features = batch["features"].to(dtype)

    def call() -> Result:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
        with torch.inference_mode(), autocast:
            return encode(features, batch["lengths"])

    return call, answer


def answer(result: Result) -> dict[str, Any]:
    """A sketch of the frames, and their lengths."""
    encoded, lengths = result
    return {"digest": [sketch(encoded, lengths).tolist(), lengths.tolist()]}


PEERS = {
    "nemo_encoder": ("nemo_toolkit", partial(prepare, "nemo", nemo)),
    "transformers_encoder": (
        "transformers",
        partial(prepare, "transformers", partial(transformers, attention="sdpa")),
    ),
    "transformers_encoder_eager": (
        "transformers",
        partial(prepare, "transformers", partial(transformers, attention="eager")),
    ),
}
