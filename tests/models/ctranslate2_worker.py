"""Folders of CTranslate2's converter for Whispers of random weights, and what CTranslate2 computes.

    .venv-peers/bin/python -P ctranslate2_worker.py [MODEL ...] FOLDER

FOLDER holds `features-BINS.npy`, (B, F, T). For each of SIZES the folder `NAME` gets Hugging Face's files, and for each kind of KINDS
`NAME-KIND` those of the converter. Of these, and of each folder MODEL, `computed.json` gets tokens and log-probabilities, and
`PATH OF THE MODEL/encoded.npy`, or for MODEL `encoded-N.npy`, the encoded frames. All is computed in float32.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
import transformers
from ctranslate2.converters import TransformersConverter

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

from whisper_cases import MERGES, base, extractor_json, tokenizer_json  # noqa: E402

# Vocabularies of the published models: English, multilingual, and large-v3's with one more language.
SIZES = {"english": (51_864, 80), "multilingual": (51_865, 80), "v3": (51_866, 128)}
KINDS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float16", "int8_float32")  # fmt: skip
MOST = 40  # tokens
WIDTH = 32


def tokenizer_of(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json in which the special tokens have the published places."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    end = 50_256 + (vocab_size > 51_864)
    codes = [*LANGUAGES][: 99 + (vocab_size > 51_865)]
    names = ["endoftext", "startoftranscript", *codes, "translate", "transcribe"]
    names += "startoflm startofprev nospeech notimestamps".split()
    names += [f"{0.02 * n:.2f}" for n in range(1501)]
    assert end + len(names) == vocab_size
    whole = tokenizer_json()
    vocab = base()
    vocab |= {f"<{n}>": n for n in range(len(vocab), end)}
    whole["model"] |= {"vocab": vocab, "merges": MERGES}
    marks = whole["added_tokens"][0]
    whole["added_tokens"] = [
        marks | {"id": end + n, "content": f"<|{name}|>"}
        for n, name in enumerate(names)
    ]
    return whole


def write_source(path: Path, vocab_size: int, bins: int) -> None:
    """A Hugging Face folder of random weights."""
    tokenizer = tokenizer_of(vocab_size)
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    end = ids["<|endoftext|>"]
    torch.manual_seed(vocab_size)
    config = transformers.WhisperConfig(
        vocab_size=vocab_size,
        num_mel_bins=bins,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        init_std=0.2,
        decoder_start_token_id=end + 1,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    languages = {name: id_ for name, id_ in ids.items() if end + 1 < id_ < ids["<|translate|>"]}  # fmt: skip
    model.generation_config = transformers.GenerationConfig(
        begin_suppress_tokens=[220, end],
        suppress_tokens=[1, 2, 7, end + 1],
        max_initial_timestamp_index=50,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        is_multilingual=vocab_size > 51_864,
        lang_to_id=languages,
        decoder_start_token_id=end + 1,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "preprocessor_config.json").write_text(json.dumps(extractor_json(bins, 30)))


def prompt_of(vocab_size: int) -> list[int]:
    """Transcription, in German if the model supports it, without times."""
    end = 50_256 + (vocab_size > 51_864)
    no_times = vocab_size - 1502
    if vocab_size == 51_864:
        return [end + 1, no_times]
    return [end + 1, end + 4, no_times - 4, no_times]


def computed(path: Path, features: np.ndarray, prompt: list[int]) -> tuple[Any, Any]:
    """Encoded frames (B, T', D); tokens and log-probabilities of greedy decoding."""
    model = ctranslate2.models.Whisper(str(path), compute_type="float32", intra_threads=1)  # fmt: skip
    view = ctranslate2.StorageView.from_array(np.ascontiguousarray(features))
    encoded = np.array(model.encode(view))
    found = model.generate(
        view,
        [prompt] * len(features),
        beam_size=1,
        length_penalty=0,
        return_scores=True,
        max_length=2 * MOST,  # half of which are for the text
    )
    tokens = [one.sequences_ids[0] for one in found]
    return encoded, {"tokens": tokens, "scores": [one.scores[0] for one in found]}


def main(models: list[str], folder: Path) -> None:
    """Write to `folder` what CTranslate2 computes."""
    answers = {}
    for name, (vocab_size, bins) in SIZES.items():
        write_source(folder / name, vocab_size, bins)
        features = np.load(folder / f"features-{bins}.npy")
        for kind in KINDS:
            made = folder / f"{name}-{kind}"
            files = ["tokenizer.json", "preprocessor_config.json"]
            converter = TransformersConverter(str(folder / name), copy_files=files)
            converter.convert(str(made), quantization=kind)
            encoded, answers[made.name] = computed(
                made, features, prompt_of(vocab_size)
            )
            np.save(made / "encoded.npy", encoded)
    for number, model in enumerate(models):
        features = np.load(folder / "features-80.npy")
        encoded, answers[model] = computed(Path(model), features, prompt_of(51_864))
        np.save(folder / f"encoded-{number}.npy", encoded)
    (folder / "computed.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:-1], Path(sys.argv[-1]))
