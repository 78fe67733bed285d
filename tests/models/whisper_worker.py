"""Numbers of transformers' own Whisper, small and of known weights.

    .venv-peers/bin/python -P whisper_worker.py FOLDER

writes `whisper.json`, which is committed in tests/golden: parameters of the published models, and of each case tokens and some numbers
of features, encoded frames and logits. The model is saved there too, in the folder `NAME` of each case.
"""

import importlib.machinery
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers  # before the stub: it checks the version of tokenizers

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "benchmarks/peers")]

from nemo_stubs import Stub  # noqa: E402
from parity_worker import Answer, sampled, shapes_of, write  # noqa: E402
from whisper_cases import (  # noqa: E402
    CASES,
    CHUNK_S,
    JUDGED,
    LENGTHS,
    PLACES,
    PROMPTS,
    TOKENS,
    Case,
    config_json,
    fill,
    generation_json,
    specials,
    speech,
    tokenizer_json,
)

# Sizes of the published models: d_model, layers of encoder and decoder, heads, bins, tokens.
PUBLISHED = {
    "whisper_tiny": (384, 4, 4, 6, 80, 51_865),
    "whisper_base": (512, 6, 6, 8, 80, 51_865),
    "whisper_small": (768, 12, 12, 12, 80, 51_865),
    "whisper_large_v3": (1280, 32, 32, 20, 128, 51_866),
    "whisper_large_v3_turbo": (1280, 32, 4, 20, 128, 51_866),
}


def import_whisper() -> None:
    """Make Whisper's modules importable without the package `tokenizers`, which they name and do not use here."""
    names = "models normalizers decoders pre_tokenizers processors trainers".split()
    for name in ("tokenizers", *(f"tokenizers.{part}" for part in names)):
        stub = Stub(name)
        stub.__path__ = []
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = stub


def extractor_of(bins: int, **settings: Any) -> Any:
    """transformers' feature extractor."""
    from transformers.models.whisper.feature_extraction_whisper import (
        WhisperFeatureExtractor,
    )

    return WhisperFeatureExtractor(feature_size=bins, **settings)


def features_of(extractor: Any) -> torch.Tensor:
    """Its features (B, T, F) of the tests' sound."""
    waveforms, lengths = speech(LENGTHS)
    sounds = [row[:n].numpy() for row, n in zip(waveforms, lengths, strict=True)]
    inputs = extractor(sounds, sampling_rate=16_000, return_tensors="pt")
    return inputs["input_features"].transpose(1, 2)


def computed(case: Case, path: Path) -> Answer:
    """What transformers' model computes for `case`; it saves itself at `path`."""
    config = transformers.WhisperConfig(**config_json(case))
    model = transformers.WhisperForConditionalGeneration(config).eval()
    state = model.state_dict()
    del state["proj_out.weight"]
    weights = fill(state)
    model.load_state_dict(weights, strict=False)
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight
    model.generation_config = transformers.GenerationConfig(**generation_json(case))
    extractor = extractor_of(case["bins"], chunk_length=CHUNK_S)
    model.save_pretrained(path)
    extractor.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    features = features_of(extractor)
    turned = features.transpose(1, 2)
    options = {"language": "de", "task": "translate"} if case["multilingual"] else {}
    answer = {
        "shapes": shapes_of(weights),
        "features": features,
        "encoded": model.model.encoder(turned).last_hidden_state,
        "logits": model(turned, decoder_input_ids=TOKENS).logits,
        "tokens": generated(model, turned, **options),
        "timed": generated(model, turned, return_timestamps=True, **options),
    }
    if case["multilingual"]:
        answer["languages"] = model.detect_language(turned).tolist()
        answer["detected"] = generated(model, turned, task="transcribe")
    # transformers takes the length of a text's tokens, we that of the text: not compared here
    answer["judged"] = [judged(model, turned, *bounds, **options) for bounds in JUDGED]
    return answer


def generated(model: Any, features: torch.Tensor, **options: Any) -> list[list[int]]:
    """Labels of one try of `generate`, without the end; with timestamps as it returns them."""
    found = model.generate(
        features, num_beams=1, force_unique_generate_call=True, **options
    )
    found = getattr(found, "sequences", found)
    ids = specials()
    prompts = {ids[f"<|{name}|>"] for name in PROMPTS}
    end = ids["<|endoftext|>"]
    rows = []
    for row in found.tolist():
        while row[0] in prompts:
            row = row[1:]
        rows.append(row[: row.index(end)] if end in row else row)
    return rows


def judged(
    model: Any, features: torch.Tensor, least: float, most: float, **options: Any
) -> list[str]:
    """Of each window, whether its text is "kept", decoded "again" or "left out"."""
    judgements = []
    judge = model._need_fallback

    def remember(*args: Any) -> Any:
        again, left_out = judge(*args)
        judgements.append("left out" if left_out else "again" if again else "kept")
        return again, left_out

    model._need_fallback = remember
    thresholds = {"logprob_threshold": least, "no_speech_threshold": most}
    model.generate(features, num_beams=1, temperature=(0.0,), **thresholds, **options)
    del model._need_fallback
    # the window continues after the last time of a text that has one
    return judgements[: len(features)]


def parameters(sizes: tuple[int, ...]) -> int:
    """Parameters of a published model that training may change, of a model without memory."""
    D, encoder, decoder, heads, bins, V = sizes
    config = transformers.WhisperConfig(
        d_model=D,
        encoder_layers=encoder,
        decoder_layers=decoder,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * D,
        decoder_ffn_dim=4 * D,
        num_mel_bins=bins,
        vocab_size=V,
        pad_token_id=50_257,
    )
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(config)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


@torch.no_grad()
def main(folder: Path) -> None:
    """Write to `folder` what transformers computes."""
    torch.set_num_threads(1)
    import_whisper()
    counts = {name: parameters(sizes) for name, sizes in PUBLISHED.items()}
    answers: dict[str, Any] = {"parameters": counts}
    for bins in (80, 128):
        features = features_of(extractor_of(bins))
        answers[f"features-{bins}"] = sampled({"published": features}, PLACES)
    for name, case in CASES.items():
        answers[name] = sampled(computed(case, folder / name), PLACES)
    write(folder / "whisper.json", "transformers", answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
