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

from asrkit.features import FeatureConfig, log_mel
from asrkit.models import load_checkpoint, make_model, presets
from asrkit.transcribe import PipelineConfig, PromptOptions, Recognizer, whisper
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


def recogniser(checkpoint, fallback=False, **asked):
    """As `generate` is asked in whisper_worker; times and all else count as texts."""
    prompt = PromptOptions(fallback=fallback, **asked)
    config = PipelineConfig(encoder="eager", prompt=prompt)
    recognizer = Recognizer.from_checkpoint(checkpoint, config)
    recognizer.decode_options = recognizer.decode_options._replace(texts=None)
    return recognizer


def translation(name):
    multilingual = known.CASES[name]["multilingual"]
    return {"language": "de", "task": "translate"} if multilingual else {}


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


MODES = [
    ("whisper", "tokens", False), ("whisper", "timed", True), ("whisper", "detected", False),
    ("whisper-en", "tokens", False), ("whisper-en", "timed", True),
]  # fmt: skip


@pytest.mark.parametrize("name, kind, timestamps", MODES)
def test_tokens_are_those_of_generate(written, name, kind, timestamps):
    asked = {} if kind == "detected" else translation(name)
    recognizer = recogniser(load_checkpoint(written(name)), **asked)
    found = recognizer(*known.speech(known.LENGTHS), timestamps=timestamps)
    assert found.tokens() == golden()[name][kind]
    if kind == "detected":
        ids = known.specials()
        languages = [ids[f"<|{code}|>"] for code in found.languages]
        assert languages == golden()[name]["languages"] and len({*languages}) == 2


@pytest.mark.parametrize("name", known.CASES)
@pytest.mark.parametrize("bounds", known.JUDGED, ids=str)
def test_texts_are_kept_left_out_or_decoded_again_as_generate_does(
    written, name, bounds, monkeypatch
):
    monkeypatch.setattr(whisper, "LEAST_LOG_PROB", bounds[0])
    monkeypatch.setattr(whisper, "NO_SPEECH", bounds[1])
    monkeypatch.setattr(whisper, "MOST_COMPRESSED", 100.0)
    recognizer = recogniser(
        load_checkpoint(written(name)), fallback=True, **translation(name)
    )
    found = []
    first = golden()[name]["tokens"]
    for row, tokens in zip(
        recognizer(*known.speech(known.LENGTHS)).tokens(), first, strict=True
    ):
        found.append("kept" if row == tokens else "again" if row else "left out")
    judged = golden()[name]["judged"][known.JUDGED.index(bounds)]
    assert found == judged


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
