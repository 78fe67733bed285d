"""The same weights in transformers' Whisper and in ours: features, encoded frames, logits and tokens, one by one.

Where `make peers` has not been run, numbers that transformers computed are compared (tests/golden/whisper.json); where it has, those
are computed again too. tests/models/whisper_worker.py writes them.
"""

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import Suppressing, aed_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import load_checkpoint, make_model, presets
from asrkit.models.prompts import PromptFormat
from asrkit.workbench.bench.peers.processes import PYTHON

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden" / "whisper.json"
sys.path.append(str(HERE))
from committed import expect_the_same  # noqa: E402

spec = importlib.util.spec_from_file_location(
    "whisper_cases", HERE / "whisper_cases.py"
)
known = importlib.util.module_from_spec(spec)
spec.loader.exec_module(known)

CLOSE = {"rtol": 0, "atol": 1e-4}
STAGES = ("features", "encoded", "logits")
PUBLISHED = [name for name in presets.PRESETS if name.startswith("whisper_")]


@pytest.fixture(autouse=True)
def small_batches(one_thread):
    """Every test of this file starts on one thread."""


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The folder that transformers' own process has filled."""
    if not PYTHON.exists():
        pytest.skip("needs .venv-peers: `make peers` installs NeMo and transformers")
    folder = tmp_path_factory.mktemp("whisper")
    worker = HERE / "whisper_worker.py"
    command = [str(PYTHON), "-P", "-W", "ignore", str(worker), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@functools.cache
def golden():
    """The committed numbers."""
    return json.loads(GOLDEN.read_text())


@pytest.fixture
def written(tmp_path):
    """written(name): the folder of a case, without transformers."""

    def write(name):
        shapes = golden()[name]["shapes"]
        weights = known.fill({key: torch.zeros(shape) for key, shape in shapes.items()})
        known.write_folder(tmp_path / name, known.CASES[name], weights)
        return tmp_path / name

    return write


@torch.no_grad()
def computed(checkpoint):
    """What we compute, stage by stage, each from our own stage before."""
    model = checkpoint.model
    waveforms, lengths = known.speech(known.LENGTHS)
    features, frames = log_mel(
        waveforms, lengths, config=FeatureConfig(**checkpoint.features)
    )
    encoded, ends, _ = model.encode(features, frames)
    assert ends.tolist() == [50 * known.CHUNK_S] * len(lengths)
    logits = model.logits(encoded, ends, known.TOKENS)
    return {"features": features, "encoded": encoded, "ends": ends, "logits": logits}


def decoder_of(checkpoint, case):
    """The decoding model with its suppressed tokens, and the prompt of `generated` in whisper_worker."""
    asked = {"language": "de", "task": "translate"} if case["multilingual"] else {}
    if case["multilingual"]:  # into English, which the prompt has no place for
        asked["target_language"] = "en"
    prompt = PromptFormat.from_notes(checkpoint.notes).tokens(**asked)
    suppressed = checkpoint.notes["suppressed"]
    return Suppressing(
        checkpoint.model, **suppressed, prompt_tokens=len(prompt)
    ), prompt


@pytest.mark.parametrize("name", known.CASES)
def test_a_folder_of_transformers_computes_the_same_here(peer, name):
    theirs = torch.load(peer / f"{name}.pt")
    ours = computed(load_checkpoint(peer / name))
    for stage in STAGES:
        torch.testing.assert_close(ours[stage], theirs[stage], **CLOSE)
    assert theirs["logits"].std() > 1


@pytest.mark.parametrize("name", known.CASES)
def test_the_committed_numbers_of_transformers_are_ours(written, name):
    ours = computed(load_checkpoint(written(name)))
    for stage in STAGES:
        wanted = torch.tensor(golden()[name][stage])
        torch.testing.assert_close(known.picked(stage, ours[stage]), wanted, **CLOSE)


@pytest.mark.parametrize("name", known.CASES)
def test_greedy_tokens_are_those_of_generate(written, name):
    checkpoint = load_checkpoint(written(name))
    ours = computed(checkpoint)
    model, prompt = decoder_of(checkpoint, known.CASES[name])
    asked = {"prompt": prompt, "most": known.LABELS}
    wanted = golden()[name]["tokens"]
    found = aed_greedy(model, ours["encoded"], ours["ends"], **asked)
    assert found.tokens() == wanted
    assert wanted != golden()[name]["unsuppressed"]


@pytest.mark.parametrize("name", known.CASES)
def test_without_suppressed_tokens_generate_finds_the_same_as_well(written, name):
    checkpoint = load_checkpoint(written(name))
    ours = computed(checkpoint)
    _, prompt = decoder_of(checkpoint, known.CASES[name])
    times = known.times()
    bare = Suppressing(
        checkpoint.model, always=times, first=[], prompt_tokens=len(prompt)
    )
    found = aed_greedy(
        bare, ours["encoded"], ours["ends"], prompt=prompt, most=known.LABELS
    )
    assert found.tokens() == golden()[name]["unsuppressed"]


@pytest.mark.parametrize("bins", [80, 128])
def test_features_of_the_published_models_are_those_of_transformers(bins):
    config = FeatureConfig(**published_features(bins))
    waveforms, lengths = known.speech(known.LENGTHS)
    features, frames = log_mel(waveforms, lengths, config=config)
    assert features.shape == (4, 3000, bins)
    assert frames.tolist() == [3000] * 4
    wanted = torch.tensor(golden()[f"features-{bins}"]["published"])
    torch.testing.assert_close(known.picked("published", features), wanted, **CLOSE)


@pytest.mark.parametrize("bins", [80, 128])
def test_all_features_of_the_published_models_are_those_of_transformers(peer, bins):
    theirs = torch.load(peer / f"features-{bins}.pt")["published"]
    waveforms, lengths = known.speech(known.LENGTHS)
    features, _ = log_mel(
        waveforms, lengths, config=FeatureConfig(**published_features(bins))
    )
    torch.testing.assert_close(features, theirs, **CLOSE)


def published_features(bins):
    """What the loader makes of the published models' preprocessor_config.json."""
    from asrkit.models.checkpoints.whisper import feature_settings

    return feature_settings(known.extractor_json(bins, 30))


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_parameters_of_transformers_and_biases_of_keys(name):
    config = presets.PRESETS[name]()
    with torch.device("meta"):
        model = make_model(config)
    ours = sum(weight.numel() for weight in model.parameters())
    attentions = config.encoder.layers + 2 * config.layers
    assert ours - attentions * config.width == golden()["parameters"][name]


def test_transformers_still_says_what_is_committed(peer):
    said = json.loads((peer / "whisper.json").read_text())
    expect_the_same(said, golden(), known.PLACES, CLOSE)
