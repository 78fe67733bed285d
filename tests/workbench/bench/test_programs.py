"""Whole programs: checkpoints that speak, a plain script's features, records of files and of cold commands, peers' texts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asrkit.features import log_mel, mel_bands
from asrkit.models import CTCConfig, load_checkpoint, presets
from asrkit.transcribe import PipelineConfig, PromptOptions, Recognizer
from asrkit.workbench.bench import programs, speaking
from asrkit.workbench.bench.file_recognizer import RATE_HZ, read_wav
from asrkit.workbench.bench.peers.peer_programs import PROGRAMS, Features
from asrkit.workbench.bench.peers.processes import PYTHON

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = replace(presets.tiny(speaking.PIECES), durations=(), ctc=False)
THREE = 3.0  # labels a second


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sounds and the three models."""
    path = tmp_path_factory.mktemp("programs")
    (long,) = speaking.recordings(path / "long", [30.0])
    speaking.recordings(path / "short", [3.0, 2.0])
    with torch.inference_mode():
        ctc = CTCConfig(vocab_size=speaking.PIECES, encoder=TINY.encoder)
        speaking.write_ctc(path / "ctc.safetensors", ctc, long)
        speaking.write_transducer(path / "rnnt.safetensors", TINY, long)
    speaking.write_whisper(path / "whisper", width=64, layers=2, heads=2)
    return path


def task(folder, kind, files):
    """Of one round."""
    model = folder / ("whisper" if kind == "whisper" else f"{kind}.safetensors")
    heard = sorted((folder / files).iterdir())
    params = {"audio_s": programs.seconds(heard), "threads": 1}
    return programs.Task(
        kind=kind, model=model, files=heard, first=heard[0], params=params, rounds=1
    )


@pytest.mark.parametrize("kind", ["ctc", "rnnt"])
def test_a_model_of_random_weights_writes_three_labels_a_second(folder, kind):
    checkpoint = load_checkpoint(folder / f"{kind}.safetensors")
    (path,) = (folder / "long").iterdir()
    samples = torch.tensor(read_wav(path))[None] / 32768
    found = Recognizer.from_checkpoint(checkpoint)(
        samples, torch.tensor([30 * RATE_HZ])
    )
    assert found.lengths.item() / 30 == pytest.approx(THREE, rel=0.2)
    assert len(set(found.tokens()[0])) > 20  # it depends on the sound


def test_a_whisper_of_random_weights_writes_as_much_of_each_sound_and_not_the_same(
    folder,
):
    checkpoint = load_checkpoint(folder / "whisper")
    config = PipelineConfig(prompt=PromptOptions(language="en", fallback=False))
    recognizer = Recognizer.from_checkpoint(checkpoint, config)
    sounds = torch.zeros(2, 30 * RATE_HZ)
    for row, path in enumerate(sorted((folder / "short").iterdir())):
        sound = torch.tensor(read_wav(path)) / 32768
        sounds[row, : len(sound)] = sound
    one, two = recognizer(sounds, torch.tensor([30 * RATE_HZ] * 2)).tokens()
    assert len(one) == len(two) == speaking.LABELS
    assert sum(a != b for a, b in zip(one, two, strict=True)) > speaking.LABELS / 4


def test_features_of_the_plain_script_are_ours():
    samples = np.random.default_rng(0).standard_normal(16_123).astype(np.float32) / 10
    ours, lengths = log_mel(torch.tensor(samples)[None], torch.tensor([16_123]))
    config = speaking.FeatureConfig()
    theirs, length = Features(mel_bands(config).numpy())(samples)
    assert length.tolist() == lengths.tolist()
    np.testing.assert_allclose(theirs[0].T, ours[0].numpy(), atol=2e-3)


def test_files_and_a_cold_command_are_measured_without_peers(folder):
    made = [*programs.cases(task(folder, "ctc", "short"), None)]
    files, cold = ([one.record() for one in case.measure()] for case in made)
    ours = set(programs.ours("ctc"))
    assert (
        {record["impl"] for record in files}
        == {record["impl"] for record in cold}
        == ours
    )
    by = {
        record["metric"]: record for record in files if record["impl"] == programs.FIRST
    }
    assert by["rtfx"]["value"] == pytest.approx(5e3 / by["latency"]["value"])
    assert (
        by["peak_memory"]["value"] > 2**26
        and by["latency"]["params"]["same_texts"] == 2
    )
    assert by["latency"]["params"]["characters"] > 10
    assert {record["what"] for record in cold} == {"cold-ctc"}


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the peers: make peers")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ctc", "onnxruntime_ctc_float32"),
        ("rnnt", "onnxruntime_rnnt_float32"),
        ("whisper", "faster_whisper_float32"),
    ],
)
def test_a_peer_writes_the_same_of_the_same_weights(folder, kind, name):
    chosen = task(folder, kind, "long" if kind == "whisper" else "short")
    models = chosen.models(str(PYTHON), [name])
    pythons = {programs.FIRST: programs.sys.executable, name: str(PYTHON)}
    found = programs.files(chosen, pythons, {programs.FIRST: chosen.model, **models})
    (record,) = (one for one in found if (one.impl, one.metric) == (name, "latency"))
    if (
        kind == "whisper"
    ):  # whose prompt is two tokens shorter there, and its text two longer
        assert record.params["edited"] < 0.1
    else:
        assert record.params["same_texts"] == len(chosen.files), record.params
    assert record.params["peer"].startswith(PROGRAMS[name][0])
