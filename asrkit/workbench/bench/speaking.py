"""Checkpoints with random weights that write some three labels a second of any sound, and sounds:
what whole programs transcribe, each in its own form of the same weights.

Fresh random weights write far too many labels or none. Here frames are made to differ
(`scripted.enliven`), and the bias of the blank is found by bisection. A Whisper's positions and its
cross-attention choose its words, so they depend on the sound, and its text ends where a position
says so: `LABELS` after the prompt.
"""

import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    Checkpoint,
    CTCConfig,
    CTCModel,
    TransducerConfig,
    TransducerModel,
    save_checkpoint,
)
from asrkit.text import SentencePieceTokenizer, byte_level_json
from asrkit.workbench.bench.file_recognizer import RATE_HZ, read_wav, write_wav
from asrkit.workbench.bench.scripted import beeps, enliven, standardize

LABELS_PER_SECOND = 3.0
LABELS = 90  # of a Whisper's text: three a second of its 30 s
PIECES = 1024
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LANGUAGES = (  # of a Whisper, in the order of its tokens
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th"
    " ur hr bg lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr"
    " pa si km sn yo so af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt"
    " haw ln ha ba jw su"
)
TIMES = 1501
TEXT_TOKENS = 50_257  # of a multilingual Whisper
MOST = 448  # its positions of text
PROMPT = 4  # start, language, task, no times
END = 3.0  # of the end's direction in the positions behind a text
QUIET = 0.1  # of rows of tokens that no text has


def recordings(folder: Path, seconds: Sequence[float]) -> list[Path]:
    """Files of beeps in noise, of these lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = [int(length * RATE_HZ) for length in seconds]
    return [write_wav(folder / f"{row}.wav", beeps(S, row)) for row, S in enumerate(counts)]


def write_ctc(path: Path, config: CTCConfig, sound: Path) -> Path:
    """Write a CTC checkpoint that writes `LABELS_PER_SECOND` of a sound; returns its path."""
    model, frames, lengths = _lively(CTCModel, config, sound)
    _spread(model.output, frames[0])

    def labels() -> int:
        scores = model.output(frames).log_softmax(-1)
        return int(ctc_greedy(scores, lengths).lengths)

    return _write(path, model, sound, labels)


def write_transducer(path: Path, config: TransducerConfig, sound: Path) -> Path:
    """Write an RNN-T checkpoint that writes `LABELS_PER_SECOND` of a sound; returns its path.

    In the joint the labels before outweigh the frame, so one label on it says little of one more.
    """
    model, frames, lengths = _lively(TransducerModel, config, sound)
    standardize(model.encoder_projection, model.encoder_projection(frames[0]))
    model.predictor.embedding.weight.mul_(3)
    history = torch.randint(PIECES, (1, 400), generator=torch.Generator().manual_seed(0))
    predicted = model.predictor(history, None)[0][0]
    standardize(model.predictor_projection, model.predictor_projection(predicted), 1.5)
    frames = model.encoder_projection(frames)
    drawn = model.predictor_projection(predicted)[:, None] + frames[0, :100]
    _spread(model.output, model.activation(drawn).flatten(0, 1))

    def labels() -> int:
        return int(transducer_greedy(model, frames, lengths).lengths)

    return _write(path, model, sound, labels)


def _lively(kind: Any, config: Any, sound: Path) -> tuple[Any, Tensor, Tensor]:
    """A model of random weights, the same ones each time, whose frames of a sound differ; these
    (1, T, D) and their length.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval().requires_grad_(False)
    samples = torch.tensor(read_wav(sound))[None] / 32768
    features = log_mel(
        samples, torch.tensor([samples.shape[1]]), config=FeatureConfig(bins=config.encoder.bins)
    )
    enliven(model.encoder, *features)
    return model, *model.encoder(*features)


def _spread(output: Any, inputs: Tensor) -> None:
    """Make logits of an output layer differ for these inputs (N, D), and `<unk>` never win."""
    standardize(output, output(inputs), 4.0)
    output.bias[0] = -1e4


def _write(path: Path, model: Any, sound: Path, labels: Callable[[], int]) -> Path:
    """Find the blank's bias by what `labels` counts, and write the checkpoint."""
    wanted = LABELS_PER_SECOND * len(read_wav(sound)) / RATE_HZ
    low, high = 0.0, 40.0
    misses: dict[float, float] = {}  # of an RNN-T they need not fall steadily
    for _ in range(12):
        bias = (low + high) / 2
        model.output.bias[PIECES] = bias
        miss = labels() - wanted
        misses[bias] = abs(miss)
        low, high = (bias, high) if miss > 0 else (low, bias)
    model.output.bias[PIECES] = min(misses, key=misses.__getitem__)
    save_checkpoint(path, Checkpoint(model, tokenizer(), {"bins": model.config.encoder.bins}, {}))
    return path


def pieces() -> list[str]:
    """`PIECES` pieces of SentencePiece: `<unk>`, syllables that begin a word, and others."""
    consonants, vowels = "bcdfghjklmnprstvwyz", "aeiou"
    made = ["".join(parts) for parts in product(consonants, vowels, "lmnrst")]
    half = PIECES // 2
    return ["<unk>", *("▁" + piece for piece in made[: half - 1]), *made[:half]]


def tokenizer() -> SentencePieceTokenizer:
    """A SentencePiece model of `pieces`."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    proto = ModelProto()
    for number, piece in enumerate(pieces()):
        proto.pieces.add(piece=piece, score=-float(number), type=2 if number == 0 else 1)
    proto.trainer_spec.model_type = 1
    return SentencePieceTokenizer(proto.SerializeToString())


def write_whisper(folder: Path, *, width: int, layers: int, heads: int) -> Path:
    """Write a multilingual Whisper of random weights as transformers saves one; returns its folder.

    Args:
        folder: which is made.
        width: of encoder and decoder.
        layers: of each.
        heads: of their attention.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    for name, contents in _whisper_files(width, layers, heads).items():
        (folder / name).write_text(json.dumps(contents, ensure_ascii=False), encoding="utf-8")
    end = special_tokens()["<|endoftext|>"]
    weights = whisper_weights(width, layers, end)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def _whisper_files(width: int, layers: int, heads: int) -> dict[str, Any]:
    """The contents of the files beside the weights; what is left out has transformers' default."""
    ids = special_tokens()
    common: dict[str, Any] = dict.fromkeys(("begin_suppress_tokens", "suppress_tokens"))
    common |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), TEXT_TOKENS)
    common["decoder_start_token_id"] = ids["<|startoftranscript|>"]
    sizes: dict[str, Any] = {"d_model": width, "vocab_size": TEXT_TOKENS + len(ids)}
    for part in ("encoder", "decoder"):
        sizes[f"{part}_layers"] = layers
        sizes[f"{part}_attention_heads"] = heads
        sizes[f"{part}_ffn_dim"] = 4 * width
    generation = {
        "max_length": MOST,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES.split()},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
    }
    kind = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
    return {
        "config.json": {**kind, **sizes, **common, "dtype": "float32"},
        "generation_config.json": {**common, **generation},
        "preprocessor_config.json": {"feature_extractor_type": "WhisperFeatureExtractor"},
        "tokenizer.json": whisper_vocabulary(),
        "tokenizer_config.json": {
            "tokenizer_class": "WhisperTokenizer",
            "pad_token": "<|endoftext|>",
        },
    }


def special_tokens() -> dict[str, int]:
    """The tokens of a multilingual Whisper that have no text, in their order."""
    names = ["endoftext", "startoftranscript", *LANGUAGES.split()]
    names += "translate transcribe startoflm startofprev nospeech notimestamps".split()
    names += [f"{0.02 * n:.2f}" for n in range(TIMES)]
    return {f"<|{name}|>": TEXT_TOKENS + number for number, name in enumerate(names)}


def whisper_vocabulary() -> dict[str, Any]:
    """A tokenizer.json of Whisper's size and form: bytes, then words and syllables of up to four
    letters, each merged of one that is shorter and a letter.
    """
    whole = json.loads(byte_level_json(*_merged()))
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole["added_tokens"] = [
        {"id": number, "content": name, **marks, "special": True}
        for name, number in special_tokens().items()
    ]
    return whole


def _merged() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """`TEXT_TOKENS` texts with their numbers, and the merges that make them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    texts = [chr(byte) for byte in kept]
    texts += [chr(256 + n) for n in range(256 - len(kept))]  # GPT-2's letters of the other bytes
    merges: list[tuple[str, str]] = []
    shorter = ["\u0120", *LETTERS]  # a space begins a word
    while len(texts) < TEXT_TOKENS:
        pairs = [*product(shorter, LETTERS)][: TEXT_TOKENS - len(texts)]
        shorter = ["".join(pair) for pair in pairs]
        texts += shorter
        merges += pairs
    return {text: number for number, text in enumerate(texts)}, merges


def whisper_weights(width: int, layers: int, end: int) -> dict[str, Tensor]:
    """Weights under transformers' names.

    Positions and cross-attention outweigh what a token says of the next one, so where programs
    round differently one word differs, not all that follow.

    Args:
        width: of encoder and decoder.
        layers: of each.
        end: the token that ends a text.
    """
    draw = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}

    def weight(name: str, *shape: int, gain: float = 1.0) -> Tensor:
        fan_in = math.prod(shape[1:])
        made[name] = torch.randn(*shape, generator=draw) * gain * fan_in**-0.5
        return made[name]

    def linear(name: str, *shape: int, gain: float = 1.0) -> None:
        weight(f"{name}.weight", *shape, gain=gain)
        made[f"{name}.bias"] = torch.zeros(shape[0])

    def norm(name: str, gain: float = 1.0) -> None:
        made[f"{name}.weight"] = torch.full((width,), gain)
        made[f"{name}.bias"] = torch.zeros(width)

    def attention(name: str, gain: float) -> None:
        linear(f"{name}.q_proj", width, width, gain=2.0)
        weight(f"{name}.k_proj.weight", width, width, gain=2.0)
        linear(f"{name}.v_proj", width, width)
        linear(f"{name}.out_proj", width, width, gain=gain)
        norm(f"{name}_layer_norm")

    for part in ("encoder", "decoder"):
        for layer in range(layers):
            name = f"model.{part}.layers.{layer}"
            attention(f"{name}.self_attn", 0.3)
            if part == "decoder":
                attention(f"{name}.encoder_attn", 1.0)
            linear(f"{name}.fc1", 4 * width, width)
            linear(f"{name}.fc2", width, 4 * width, gain=0.3)
            norm(f"{name}.final_layer_norm")
    linear("model.encoder.conv1", width, 80, 3, gain=4.0)
    linear("model.encoder.conv2", width, width, 3, gain=2.0)
    norm("model.encoder.layer_norm")
    made["model.encoder.embed_positions.weight"] = _sines(1500, width)
    tokens = torch.randn(TEXT_TOKENS + len(special_tokens()), width, generator=draw)
    places = torch.randn(MOST, width, generator=draw)
    places[PROMPT - 1 + LABELS :] += END * tokens[end]
    tokens[:256] *= QUIET  # parts of letters
    tokens[end + 1 :] *= QUIET
    made["model.decoder.embed_tokens.weight"] = 0.1 * tokens
    made["model.decoder.embed_positions.weight"] = places
    norm("model.decoder.layer_norm", gain=4.0)
    return made


def _sines(length: int, width: int) -> Tensor:
    """The encoder's positions (length, width)."""
    half = width // 2
    rates = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
