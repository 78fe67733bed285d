"""Forms of an English Whisper that other programs read; see FORMS and program_worker.py.

faster-whisper reads the published CTranslate2 folder. Intel's exporter (optimum-intel 2.2) needs an
older transformers than the one measured here, so `write_openvino` makes the same graphs: a decoder
that keeps keys and values as states.
"""

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

JOINED = {"qkv": ("query", "key", "value"), "key_value": ("key", "value")}
MAGIC = 0x67676D6C  # "ggml"
FLOAT32, FLOAT16, Q8_0 = 0, 1, 8  # ggml's tensor types
FILE_TYPES = {FLOAT16: 1, Q8_0: 2007}  # ggml's file types; 2000 is the version of its blocks
BLOCK = 32  # weights that share a scale


def load(source: str) -> Any:
    """The checkpoint of a folder, in float32."""
    from asrkit.models import load_checkpoint

    return load_checkpoint(source, dtype=torch.float32)


def weights_of(model: Any) -> dict[str, Tensor]:
    """asrkit's weights by transformers' names; keys have no bias there."""
    from asrkit.models.checkpoints.names import LAYERS
    from asrkit.models.checkpoints.weights import replaced

    weights = {}
    for ours, weight in model.state_dict().items():
        joined = [part for part in JOINED if f".{part}." in ours]
        parts = JOINED[joined[0]] if joined else [""]
        for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
            name = ours.replace(f".{joined[0]}.", f".{part}.") if joined else ours
            if not name.endswith(".key.bias"):
                weights[replaced(name, LAYERS["whisper_to_transformers"])] = rows.contiguous()
    return weights


def settings(checkpoint: Any) -> dict[str, dict[str, Any]]:
    """Contents of a Hugging Face folder's JSON files, by name."""
    config, notes = checkpoint.model.config, checkpoint.notes
    sizes = {"d_model": config.width, "vocab_size": config.vocab_size}
    sizes |= {"num_mel_bins": config.encoder.bins, "max_source_positions": config.encoder.most}
    sizes["max_target_positions"] = config.most
    for name, part in (("encoder", config.encoder), ("decoder", config)):
        sizes |= {f"{name}_layers": part.layers, f"{name}_attention_heads": part.heads}
        sizes[f"{name}_ffn_dim"] = part.expansion * part.width
    tokens = dict.fromkeys(("eos_token_id", "pad_token_id"), config.eos)
    tokens |= dict.fromkeys(("bos_token_id", "decoder_start_token_id"), config.bos)
    tokens["suppress_tokens"] = notes["suppressed"]["always"]
    tokens["begin_suppress_tokens"] = notes["suppressed"]["first"]
    no_times = notes["whisper"]["no_times"]
    generation = {
        "is_multilingual": False,
        "max_length": config.most,
        "max_initial_timestamp_index": notes["whisper"]["most_first"],
        "no_timestamps_token_id": no_times,
        "prev_sot_token_id": no_times - 2,
    }
    kind = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "nb_max_frames": 3000}
    extractor |= {"feature_size": config.encoder.bins, "sampling_rate": 16_000, "n_fft": 400}
    extractor |= {"hop_length": 160, "chunk_length": 30, "n_samples": 480_000}
    named = {"tokenizer_class": "WhisperTokenizer"}
    named |= dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    return {
        "config.json": {**kind, **sizes, **tokens, "dtype": "float32"},
        "generation_config.json": {**tokens, **generation},
        "preprocessor_config.json": extractor,
        "tokenizer_config.json": named,
    }


def write_huggingface(source: str, target: str) -> None:
    """Write a folder as transformers does."""
    from safetensors.torch import save_file

    checkpoint = load(source)
    folder = Path(target)
    folder.mkdir()
    for name, contents in settings(checkpoint).items():
        (folder / name).write_text(json.dumps(contents), encoding="utf-8")
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer.contents, encoding="utf-8")
    weights = weights_of(checkpoint.model)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


class Decoder(nn.Module):
    """transformers' decoder in plain torch: logits, and keys and values (B, H, T, D / H).

    Args:
        model: WhisperForConditionalGeneration, in eval mode.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model.model.decoder
        self.output = model.proj_out

    def forward(
        self, input_ids: Tensor, encoder_hidden_states: Tensor, beam_idx: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits (B, U, V); keys and values of the text by layer, then those of the frames."""
        T, U = past[0].shape[2], input_ids.shape[1]
        places = torch.arange(T, T + U)
        mask = torch.arange(T + U) <= places[:, None]
        x = self.decoder.embed_tokens(input_ids) + self.decoder.embed_positions.weight[places]
        kept, frames = [], []
        for number, layer in enumerate(self.decoder.layers):
            normal = layer.self_attn_layer_norm(x)
            cached = [tensor[beam_idx] for tensor in past[2 * number : 2 * number + 2]]
            added = keys_values(layer.self_attn, normal)
            text = [torch.cat(pair, 2) for pair in zip(cached, added, strict=True)]
            x = x + attend(layer.self_attn, normal, text, mask)
            speech = keys_values(layer.encoder_attn, encoder_hidden_states)
            x = x + attend(layer.encoder_attn, layer.encoder_attn_layer_norm(x), speech, None)
            x = x + layer.fc2(gelu(layer.fc1(layer.final_layer_norm(x))))
            kept += text
            frames += speech
        return (self.output(self.decoder.layer_norm(x)), *kept, *frames)


def keys_values(attention: Any, x: Tensor) -> list[Tensor]:
    """Keys and values of x (B, T, D), each (B, H, T, D / H)."""
    layers = (attention.k_proj, attention.v_proj)
    return [_by_head(layer(x), attention.num_heads) for layer in layers]


def attend(attention: Any, x: Tensor, cache: list[Tensor], mask: Tensor | None) -> Tensor:
    """Attention of x (B, U, D) over keys and values."""
    query = _by_head(attention.q_proj(x), attention.num_heads)
    keys, values = cache
    mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return attention.out_proj(mixed.transpose(1, 2).flatten(2))


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def write_openvino(source: str, target: str) -> None:
    """Write a folder for OpenVINO GenAI's WhisperPipeline, weights in float16 as published."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer, WhisperForConditionalGeneration

    write_huggingface(source, target)
    folder = Path(target)
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    config = model.config
    graphs = {
        "encoder": openvino.convert_model(
            model.model.encoder, example_input=torch.zeros(1, config.num_mel_bins, 3000)
        ),
        "decoder": decoder_graph(model),
    }
    graphs["encoder"].inputs[0].set_names({"input_features"})
    graphs["encoder"].outputs[0].set_names({"last_hidden_state"})
    for name, graph in graphs.items():
        openvino.save_model(graph, folder / f"openvino_{name}_model.xml")
    words = AutoTokenizer.from_pretrained(folder)
    graph_pair = convert_tokenizer(words, with_detokenizer=True, skip_special_tokens=True)
    for name, graph in zip(("tokenizer", "detokenizer"), graph_pair, strict=True):
        openvino.save_model(graph, folder / f"openvino_{name}.xml")
    (folder / "model.safetensors").unlink()


def decoder_graph(model: Any) -> Any:
    """OpenVINO's graph of a `Decoder`. Its states are the keys and values of the text and of the
    frames; those of the frames are computed once after a reset.
    """
    import openvino
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    config = model.config
    heads, layers = config.decoder_attention_heads, config.decoder_layers
    size = config.d_model // heads
    past = [torch.zeros(1, heads, 3, size)] * (2 * layers)
    frames = torch.zeros(1, config.max_source_positions, config.d_model)
    example = (torch.ones(1, 2, dtype=torch.long), frames, torch.zeros(1, dtype=torch.int32), *past)
    names = ["input_ids", "encoder_hidden_states", "beam_idx"]
    names += [f"past.{number}" for number in range(2 * layers)]
    shapes = [[-1, -1], [-1, -1, config.d_model], [-1], *[[-1, heads, -1, size]] * len(past)]
    graph = openvino.convert_model(
        Decoder(model),
        example_input=example,
        input=[openvino.PartialShape(shape) for shape in shapes],
    )
    for port, name in zip(graph.inputs, names, strict=True):
        port.set_names({name})
    results = graph.get_results()
    graph.outputs[0].set_names({"logits"})
    pairs = {}
    for number in range(2 * layers):
        graph.outputs[1 + number].set_names({f"present.{number}"})
        pairs[f"past.{number}"] = f"present.{number}"
    apply_make_stateful_transformation(graph, pairs)
    B = ops.gather(ops.shape_of(graph.input("input_ids")), ops.constant([0]), ops.constant(0))
    empty = ops.concat([B, *(ops.constant(np.array([n])) for n in (heads, 0, size))], 0)
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue" and not node.inputs():
            node.set_arguments([ops.broadcast(ops.constant(np.float32(0)), empty)])
    graph.validate_nodes_and_infer_types()
    for number, result in enumerate(results[1 + 2 * layers :]):
        computed = result.input(0).get_source_output()
        users = [port for port in computed.get_target_inputs() if port.get_node() != result]
        kept = ops.read_value(computed, f"frames.{number}")
        for user in users:
            user.replace_source_output(kept.output(0))
        graph.remove_result(result)
        graph.add_sinks([ops.assign(kept, f"frames.{number}")])
    return graph


def write_ggml(source: str, target: str, kind: int) -> None:
    """Write a file of whisper.cpp: sizes, mel filters, the bytes of each token, and the weights.

    Args:
        source: folder that asrkit loads.
        target: file to write.
        kind: type of the matrices; convolutions are always float16, vectors and positions float32.
    """
    from asrkit.features import FeatureConfig, mel_bands
    from asrkit.models.checkpoints.names import LAYERS
    from asrkit.models.checkpoints.weights import replaced

    checkpoint = load(source)
    config = checkpoint.model.config
    encoder = config.encoder
    bands = mel_bands(FeatureConfig(**checkpoint.features)).T.contiguous().numpy()
    sizes = [config.vocab_size, encoder.most, encoder.width, encoder.heads, encoder.layers]
    sizes += [config.most, config.width, config.heads, config.layers, encoder.bins]
    with Path(target).open("wb") as file:
        file.write(struct.pack("<I11i", MAGIC, *sizes, FILE_TYPES[kind]))
        file.write(struct.pack("<2i", *bands.shape) + bands.astype("<f4").tobytes())
        texts = [*token_bytes(checkpoint.tokenizer.contents, config.eos)]
        file.write(struct.pack("<i", len(texts)))
        for text in texts:
            file.write(struct.pack("<i", len(text)) + text)
        for name, weight in weights_of(checkpoint.model).items():
            write_tensor(file, replaced(name, LAYERS["whisper_to_openai"]), weight.numpy(), kind)


def token_bytes(contents: str, count: int) -> Iterator[bytes]:
    """The bytes of the first `count` tokens of a byte-level tokenizer.json."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = {chr(byte): byte for byte in kept}
    letters |= {chr(256 + n): byte for n, byte in enumerate(others)}  # GPT-2's letters
    ids = json.loads(contents)["model"]["vocab"]
    for text in sorted(ids, key=lambda text: ids[text])[:count]:
        yield bytes(letters[letter] for letter in text)


def write_tensor(file: BinaryIO, name: str, values: np.ndarray, kind: int) -> None:
    """Append a weight to a ggml file: number of dimensions, length of the name, type, sizes in
    reverse order, name, values.
    """
    if name.endswith(("conv1.bias", "conv2.bias")):
        values = values[:, None]
    if values.ndim == 1 or name.endswith(("positional_embedding", "bias")):
        kind = FLOAT32
    elif values.ndim == 3:
        kind = FLOAT16
    header = (values.ndim, len(name), kind, *values.shape[::-1])
    file.write(struct.pack(f"<{len(header)}i", *header) + name.encode())
    file.write(encoded(values, kind))


def encoded(values: np.ndarray, kind: int) -> bytes:
    """Values in ggml's layout: floats, or Q8_0 blocks of a float16 scale and 32 int8."""
    if kind != Q8_0:
        return values.astype("<f4" if kind == FLOAT32 else "<f2").tobytes()
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    whole = np.round(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    rows = [scale.astype("<f2").view(np.int8), whole.astype(np.int8)]
    return np.concatenate(rows, 1).tobytes()


FORMS: dict[str, Callable[[str, str], None]] = {  # source and target path
    "huggingface": write_huggingface,
    "openvino": write_openvino,
    "ggml-f16.bin": partial(write_ggml, kind=FLOAT16),
    "ggml-q8_0.bin": partial(write_ggml, kind=Q8_0),
}
