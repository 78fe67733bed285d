"""transformers' Whisper, and ours with the same weights: features, encoded frames, logits and tokens, one by one.

As in test_parity.py, what it computes is committed; whisper_worker.py writes it.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from asrkit.features import FeatureConfig, log_mel
from asrkit.models import load_checkpoint, make_model, presets
from asrkit.models.checkpoints.whisper import feature_settings
from asrkit.transcribe import PipelineConfig, PromptOptions, Recognizer, whisper

sys.path.append(str(Path(__file__).resolve().parent))
import whisper_cases as known
from published import CLOSE, expect_committed, filled_by_peers, golden, zeros

GOLDEN = golden("whisper")
SOUND = known.speech(known.LENGTHS)
PUBLISHED = [name for name in presets.PRESETS if name.startswith("whisper_")]


@pytest.fixture(autouse=True)
def small_batches(one_thread):
    """Every test of this file starts on one thread."""


@pytest.fixture
def written(tmp_path):
    """written(name): the checkpoint of a case, without transformers."""

    def write(name):
        weights = known.fill(zeros(GOLDEN[name]["shapes"]))
        known.write_folder(tmp_path / name, known.CASES[name], weights)
        return load_checkpoint(tmp_path / name)

    return write


@torch.no_grad()
def expect_the_numbers(checkpoint, theirs):
    """Each stage, computed from our own stage before it, equals the peer's."""
    model = checkpoint.model
    features, frames = log_mel(*SOUND, config=FeatureConfig(**checkpoint.features))
    encoded, ends, _ = model.encode(features, frames)
    assert ends.tolist() == [50 * known.CHUNK_S] * 4
    logits = model.logits(encoded, ends, known.TOKENS)
    stages = {"features": features, "encoded": encoded, "logits": logits}
    for stage, values in stages.items():
        found = known.picked(stage, values)
        wanted = torch.tensor(theirs[stage])
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("name", known.CASES)
def test_the_committed_numbers_of_transformers_are_ours(written, name):
    expect_the_numbers(written(name), GOLDEN[name])


@pytest.mark.live
def test_transformers_still_gives_the_committed_numbers_and_its_folders_are_read(
    tmp_path,
):
    filled_by_peers(tmp_path, "whisper_worker.py")
    numbers = json.loads((tmp_path / "whisper.json").read_text())
    expect_committed(numbers, GOLDEN)
    for name in known.CASES:
        expect_the_numbers(load_checkpoint(tmp_path / name), numbers[name])


def recogniser(checkpoint, name, *, fallback=False, detect=False):
    """The options of `generate` in whisper_worker; times and all else count as texts."""
    options = {"language": "de", "task": "translate"}
    if detect or not known.CASES[name]["multilingual"]:
        options = {}
    prompt = PromptOptions(fallback=fallback, **options)
    config = PipelineConfig(encoder="eager", prompt=prompt)
    recognizer = Recognizer.from_checkpoint(checkpoint, config)
    recognizer.decode_options = recognizer.decode_options._replace(texts=None)
    return recognizer


@pytest.mark.parametrize("name, kind", [
    ("whisper", "tokens"), ("whisper", "timed"), ("whisper", "detected"), ("whisper-en", "tokens"), ("whisper-en", "timed"),
])  # fmt: skip
def test_tokens_are_those_of_generate(written, name, kind):
    recognizer = recogniser(written(name), name, detect=kind == "detected")
    found = recognizer(*SOUND, timestamps=kind == "timed")
    assert found.tokens() == GOLDEN[name][kind]
    if kind == "detected":
        ids = known.specials()
        languages = [ids[f"<|{code}|>"] for code in found.languages]
        assert languages == GOLDEN[name]["languages"]
        assert len({*languages}) == 2


@pytest.mark.parametrize("name", known.CASES)
def test_texts_are_kept_left_out_or_decoded_again_as_generate_does(
    written, name, monkeypatch
):
    monkeypatch.setattr(whisper, "MOST_COMPRESSED", 100.0)
    # generate() keeps the last draw, asrkit keeps the likeliest text
    every = lambda self, drawn, found, rows: torch.ones_like(rows).bool()  # noqa: E731
    monkeypatch.setattr(whisper.WhisperDecoder, "_better", every)
    recognizer = recogniser(written(name), name, fallback=True)
    for bounds, wanted in zip(known.JUDGED, GOLDEN[name]["judged"], strict=True):
        monkeypatch.setattr(whisper, "LEAST_LOG_PROB", bounds[0])
        monkeypatch.setattr(whisper, "NO_SPEECH", bounds[1])
        rows = zip(recognizer(*SOUND).tokens(), GOLDEN[name]["tokens"], strict=True)
        judged = [
            "kept" if row == first else "again" if row else "left out"
            for row, first in rows
        ]
        assert judged == wanted


@pytest.mark.parametrize("bins", [80, 128])
def test_features_of_the_published_models_are_those_of_transformers(bins):
    config = FeatureConfig(**feature_settings(known.extractor_json(bins, 30)))
    features, frames = log_mel(*SOUND, config=config)
    assert features.shape == (4, 3000, bins)
    assert frames.tolist() == [3000] * 4
    wanted = torch.tensor(GOLDEN[f"features-{bins}"]["published"])
    torch.testing.assert_close(known.picked("published", features), wanted, **CLOSE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_parameters_of_transformers_and_biases_of_keys(name):
    config = presets.PRESETS[name]()
    with torch.device("meta"):
        model = make_model(config)
    ours = sum(weight.numel() for weight in model.parameters())
    attentions = config.encoder.layers + 2 * config.layers
    assert ours - attentions * config.width == GOLDEN["parameters"][name]
    assert config.encoder.bins == (128 if "v3" in name else 80)
    assert config.heads == config.encoder.heads == config.width // 64
