"""Attention decoders of NeMo and transformers in processes of their own, run by the Python of
`make peers`.

    python -P peer_attention.py nemo_aed
    {"plan": "plan.pt", "threads": 1, "observe": true}
    {"wall_ms": ..., "cpu_ms": ..., "digest": [labels, lengths, frames], "version": "..."}

`plan` is a file that `write` made: the weights of asrkit's decoder under the peers' names, its
sizes, encoded frames and the prompt. A request is one call, greedy, from frames to tokens: NeMo's
`GreedySequenceGenerator`, as its Canary models decode, and `generate` of transformers'
`CanaryForConditionalGeneration`. Protocol and timing are those of
asrkit.workbench.bench.peers.peer_worker. Frames of labels are -1: neither tells them.
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
from torch import Tensor

PARTS = (".query.", ".key.", ".value.")
NEMO = {  # of a layer
    "self_attention.query": "first_sub_layer.query_net",
    "self_attention.key": "first_sub_layer.key_net",
    "self_attention.value": "first_sub_layer.value_net",
    "self_attention.out": "first_sub_layer.out_projection",
    "cross_attention.query": "second_sub_layer.query_net",
    "cross_attention.key": "second_sub_layer.key_net",
    "cross_attention.value": "second_sub_layer.value_net",
    "cross_attention.out": "second_sub_layer.out_projection",
    "feed_forward.0": "third_sub_layer.dense_in",
    "feed_forward.2": "third_sub_layer.dense_out",
    "self_norm": "layer_norm_1",
    "cross_norm": "layer_norm_2",
    "feed_forward_norm": "layer_norm_3",
}
TRANSFORMERS = {
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.out": "self_attn.o_proj",
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key": "encoder_attn.k_proj",
    "cross_attention.value": "encoder_attn.v_proj",
    "cross_attention.out": "encoder_attn.o_proj",
    "feed_forward.0": "mlp.fc1",
    "feed_forward.2": "mlp.fc2",
    "self_norm": "input_layernorm",
    "cross_norm": "post_attention_layernorm",
    "feed_forward_norm": "final_layernorm",
}
SIZES = ("vocab_size", "width", "layers", "heads", "expansion", "most", "bos", "eos", "pad")


def write(path: Path, model: Any, encoded: Tensor, lengths: Tensor, prompt: Tensor) -> None:
    """Write what a peer needs to decode the same batch with the same weights; asrkit's side.

    Args:
        path: the file.
        model: an AEDModel whose layers are not packed.
        encoded: frames (B, T, D).
        lengths: of the frames, (B,).
        prompt: tokens before the text, (P,).
    """
    weights = split(model.state_dict())
    plan = {
        "weights": weights,
        "sizes": {name: getattr(model.config, name) for name in SIZES},
        "encoded": encoded,
        "lengths": lengths,
        "prompt": prompt,
    }
    torch.save(plan, path)


def split(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of our decoder with queries, keys and values apart, without the encoder's."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.startswith(("encoder", "ctc_head")):
            continue
        parts: tuple[str, ...] = ()
        if ".qkv." in name:
            parts = PARTS
        elif ".key_value." in name:
            parts = PARTS[1:]
        if not parts:
            found[name] = weight
        for part, rows in zip(parts, weight.chunk(max(len(parts), 1)), strict=False):
            found[re.sub(r"\.(qkv|key_value)\.", part, name)] = rows
    return found


def renamed(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights of the layers by a peer's names, "layers.0.mlp.fc1.weight"."""
    found = {}
    for name, weight in weights.items():
        layer = re.match(r"layers\.\d+\.", name)
        if layer:
            ours, _, kind = name[layer.end() :].rpartition(".")
            found[f"{layer[0]}{names[ours]}.{kind}"] = weight
    return found


def of_module(weights: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    """Weight and bias of a module."""
    return {kind: weights[f"{module}.{kind}"] for kind in ("weight", "bias")}


def nemo_aed(plan: Mapping[str, Any]) -> Callable[[], Tensor]:
    """NeMo's greedy generator: tokens (B, P + N), `pad` behind eos."""
    from nemo_stubs import stub_nemo_aed

    stub_nemo_aed()
    from nemo.collections.asr.modules.transformer.transformer_decoders import TransformerDecoder
    from nemo.collections.asr.modules.transformer.transformer_generators import (
        GreedySequenceGenerator,
    )
    from nemo.collections.asr.modules.transformer.transformer_modules import TransformerEmbedding
    from nemo.collections.asr.parts.submodules.token_classifier import TokenClassifier

    sizes = plan["sizes"]
    weights = plan["weights"]
    D = sizes["width"]
    embedding = TransformerEmbedding(sizes["vocab_size"], D, sizes["most"], num_token_types=0)
    embedding.token_embedding.load_state_dict({"weight": weights["embedding.weight"]})
    embedding.position_embedding.pos_enc = weights["positions"]
    embedding.layer_norm.load_state_dict(of_module(weights, "embedding_norm"))
    inner = D * sizes["expansion"]
    decoder = TransformerDecoder(sizes["layers"], D, inner, sizes["heads"], pre_ln=True)
    final = {f"final_layer_norm.{k}": v for k, v in of_module(weights, "norm").items()}
    decoder.load_state_dict(renamed(weights, NEMO) | final)
    classifier = TokenClassifier(D, sizes["vocab_size"])
    output = {"weight": weights["embedding.weight"], "bias": weights["output_bias"]}
    classifier.mlp.last_linear_layer.load_state_dict(output)
    special = {name: sizes[name] for name in ("pad", "bos", "eos")}
    generator = GreedySequenceGenerator(
        embedding, decoder, classifier, max_sequence_length=sizes["most"], **special
    )
    generator.freeze()
    encoded, mask, prompt = inputs(plan)

    def decode() -> Tensor:
        tokens, _, _, _ = generator(prompt, encoded, mask.to(encoded.dtype))
        return tokens

    return decode


def transformers_canary(plan: Mapping[str, Any]) -> Callable[[], Tensor]:
    """transformers' `generate`: tokens (B, P + N), `pad` behind eos."""
    from transformers import CanaryConfig, CanaryForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput

    sizes = plan["sizes"]
    weights = plan["weights"]
    D = sizes["width"]
    decoder = {
        "vocab_size": sizes["vocab_size"],
        "hidden_size": D,
        "intermediate_size": D * sizes["expansion"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["heads"],
        "head_dim": D // sizes["heads"],
        "max_position_embeddings": sizes["most"],
    }
    special = {f"{name}_token_id": sizes[name] for name in ("pad", "bos", "eos")}
    encoder = {"model_type": "parakeet_encoder", "num_hidden_layers": 1, "hidden_size": D}
    encoder |= {"num_attention_heads": sizes["heads"], "intermediate_size": D}
    config = CanaryConfig(
        encoder_config=encoder,  # of no account: frames are given
        decoder_config={**decoder, **special},
        vocab_size=sizes["vocab_size"],
        decoder_start_token_id=sizes["bos"],
        **special,
    )
    model = CanaryForConditionalGeneration(config).eval().requires_grad_(False)
    named = renamed(weights, TRANSFORMERS) | {"embed_tokens.weight": weights["embedding.weight"]}
    for ours, theirs in (("norm", "norm"), ("embedding_norm", "embedding_layernorm")):
        named |= {f"{theirs}.{k}": v for k, v in of_module(weights, ours).items()}
    model.model.decoder.load_state_dict(named)
    model.proj_out.bias.copy_(weights["output_bias"])
    places = model.model.decoder.pos_emb  # it divides by the root of D itself
    places.positional_embedding = weights["positions"] * D**0.5
    encoded, mask, prompt = inputs(plan)
    frames = BaseModelOutput(last_hidden_state=encoded)
    frames.attention_mask = mask

    def decode() -> Tensor:
        return model.generate(
            encoder_outputs=frames,
            decoder_input_ids=prompt,
            max_length=sizes["most"],
            do_sample=False,
            num_beams=1,
        )

    return decode


def inputs(plan: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Frames (B, T, D), which of them are valid (B, T), int64, and prompts (B, P)."""
    encoded = plan["encoded"]
    B, T, _ = encoded.shape
    mask = torch.arange(T) < plan["lengths"][:, None]
    return encoded, mask.long(), plan["prompt"].expand(B, -1)


AED_DECODERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Callable[[], Tensor]]]] = {
    "nemo_aed": ("nemo_toolkit", nemo_aed),
    "transformers_canary": ("transformers", transformers_canary),
}


@functools.lru_cache(1)
def prepared(peer: str, path: str) -> tuple[Callable[[], Tensor], Mapping[str, Any]]:
    """The peer's call for a plan, and the plan.

    Args:
        peer: a key of AED_DECODERS.
        path: of what `write` wrote.
    """
    plan = torch.load(path)
    _, make = AED_DECODERS[peer]
    return make(plan), plan


def digest(tokens: Tensor, plan: Mapping[str, Any]) -> list[Any]:
    """Labels, lengths and frames of tokens (B, P + N), as asrkit's `Hypotheses` have them."""
    rows = []
    for row in tokens[:, len(plan["prompt"]) :].tolist():
        eos = plan["sizes"]["eos"]
        rows.append(row[: row.index(eos)] if eos in row else row)
    longest = max(map(len, rows))
    labels = [row + [-1] * (longest - len(row)) for row in rows]
    return [labels, [len(row) for row in rows], [[-1] * longest] * len(rows)]


def serve(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, as above."""
    torch.set_num_threads(request["threads"])
    decode, plan = prepared(peer, request["plan"])
    wall_start = time.perf_counter_ns()
    cpu_start = time.process_time_ns()
    with torch.inference_mode():
        tokens = decode()
    cpu_ns = time.process_time_ns() - cpu_start
    wall_ns = time.perf_counter_ns() - wall_start
    package, _ = AED_DECODERS[peer]
    answer = {
        "wall_ms": wall_ns / 1e6,
        "cpu_ms": cpu_ns / 1e6,
        "version": f"{package} {version(package)}",
    }
    if request["observe"]:
        answer["digest"] = digest(tokens, plan)
    return answer


def main(peer: str) -> None:
    """Answer until the requests end."""
    sys.path.append(str(Path(__file__).parent))
    from peer_worker import answer_requests

    answer_requests(functools.partial(serve, peer))


if __name__ == "__main__":
    main(sys.argv[1])
