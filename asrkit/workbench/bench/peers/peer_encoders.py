"""FastConformer encoders of NeMo and transformers in processes of their own, run by the Python of
`make peers`.

    python -P peer_encoders.py nemo_encoder
    {"plan": "plan.pt", "mode": "bfloat16", "threads": 1, "observe": true}
    {"wall_ms": ..., "cpu_ms": ..., "digest": [sketch, lengths], "version": "..."}

`plan` is a file that `write` made: the weights of asrkit's encoder under the peers' names, its
sizes, and features. A request is one call, in eval mode: `mode` is float32, autocast (float32
weights, products in bfloat16) or bfloat16 (all of it). Protocol and timing are those of
asrkit.workbench.bench.peers.peer_worker. transformers is asked for its `sdpa` attention, and once
more for its `eager` one.
"""

import functools
import re
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
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


class NemoEncoder(nn.Module):
    """NeMo's ConformerEncoder, set up as its FastConformer checkpoints are: features (B, T, F) in,
    (B, T', D) and lengths out.
    """

    def __init__(self, sizes: Mapping[str, Any], weights: Mapping[str, dict[str, Tensor]]) -> None:
        super().__init__()
        from nemo_stubs import stub_nemo_encoder

        stub_nemo_encoder()
        from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

        self.encoder = ConformerEncoder(
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
        load(self.encoder, weights["nemo"])

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, T', D) and their lengths (B,)."""
        encoded, lengths = self.encoder(audio_signal=features.transpose(1, 2), length=lengths)
        return encoded.transpose(1, 2), lengths


class TransformersEncoder(nn.Module):
    """transformers' ParakeetEncoder: features (B, T, F) in, (B, T', D) and lengths out."""

    def __init__(
        self,
        sizes: Mapping[str, Any],
        weights: Mapping[str, dict[str, Tensor]],
        attention: str = "sdpa",
    ) -> None:
        super().__init__()
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
        self.encoder = ParakeetEncoder(config)
        load(self.encoder, weights["transformers"])

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, T', D) and their lengths (B,)."""
        mask = torch.arange(features.shape[1]) < lengths[:, None]
        output = self.encoder(features, attention_mask=mask)
        return output.last_hidden_state, output.attention_mask.sum(-1)


def load(encoder: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give `encoder` these weights, strictly; RuntimeError names what does not fit."""
    missing, unknown = encoder.load_state_dict(weights, strict=False, assign=True)
    made = (".inv_freq", "pos_enc.pe")  # not loaded
    wrong = [name for name in (*missing, *unknown) if not name.endswith(made)]
    if wrong:
        raise RuntimeError(f"its weights have other names: {', '.join(wrong[:4])}")


ENCODERS: dict[str, tuple[str, Callable[..., nn.Module]]] = {
    "nemo_encoder": ("nemo_toolkit", NemoEncoder),
    "transformers_encoder": ("transformers", TransformersEncoder),
    "transformers_encoder_eager": (
        "transformers",
        functools.partial(TransformersEncoder, attention="eager"),
    ),
}


@functools.lru_cache(1)
def prepared(peer: str, plan: str, mode: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The peer's encoder with the weights of `plan`, and the features and lengths there.

    Args:
        peer: a key of ENCODERS.
        plan: path of what `write` wrote.
        mode: "float32", "autocast" or "bfloat16".
    """
    # not mapped: weights in the page cache are 5 % faster than those that asrkit made in memory
    batch = torch.load(plan)
    dtype = torch.float32
    if mode == "bfloat16":
        dtype = torch.bfloat16
    _, make = ENCODERS[peer]
    encoder = make(batch["sizes"], batch["weights"]).eval().requires_grad_(False)
    return encoder.to(dtype), batch["features"].to(dtype), batch["lengths"]


def serve(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, as above."""
    torch.set_num_threads(request["threads"])
    encoder, features, lengths = prepared(peer, request["plan"], request["mode"])
    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16, enabled=request["mode"] == "autocast"),
    ):
        wall_start = time.perf_counter_ns()
        cpu_start = time.process_time_ns()
        encoded, encoded_lengths = encoder(features, lengths)
        cpu_ns = time.process_time_ns() - cpu_start
        wall_ns = time.perf_counter_ns() - wall_start
    package = ENCODERS[peer][0]
    answer = {
        "wall_ms": wall_ns / 1e6,
        "cpu_ms": cpu_ns / 1e6,
        "version": f"{package} {version(package)}",
    }
    if request["observe"]:
        answer["digest"] = [
            sketch(encoded, encoded_lengths).tolist(),
            encoded_lengths.tolist(),
        ]
    return answer


def main(peer: str) -> None:
    """Answer until the requests end."""
    sys.path.append(str(Path(__file__).parent))
    from peer_worker import answer_requests

    answer_requests(functools.partial(serve, peer))


if __name__ == "__main__":
    main(sys.argv[1])
