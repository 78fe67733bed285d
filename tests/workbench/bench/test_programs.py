"""Whole programs: checkpoints that speak, a plain script's features, records of files and of cold commands, peers' texts."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from asrkit.features import log_mel, mel_bands
from asrkit.models import CTCConfig, load_checkpoint, presets
from asrkit.transcribe import Recognizer
from asrkit.workbench.bench import programs, speaking
from asrkit.workbench.bench.file_recognizer import RATE_HZ, read_wav
from asrkit.workbench.bench.peers.peer_programs import PROGRAMS, Features
from asrkit.workbench.bench.peers.processes import PYTHON
from asrkit.workbench.measure import Timing

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = replace(presets.tiny(speaking.PIECES), durations=(), ctc=False)
CTC = CTCConfig(vocab_size=speaking.PIECES, encoder=TINY.encoder)
THREE = 3.0  # labels a second
THEIRS = ("onnxruntime_ctc_float32", "sherpa_onnx_ctc_float32")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A sound of ten seconds."""
    (path,) = speaking.recordings(tmp_path_factory.mktemp("long"), [10.0])
    return path


@pytest.mark.parametrize("write, config", [
    (speaking.write_ctc, CTC),
    (speaking.write_transducer, TINY),
])  # fmt: skip
def test_a_model_of_random_weights_writes_three_labels_a_second(
    long, tmp_path, write, config
):
    with torch.inference_mode():
        path = write(tmp_path / "model.safetensors", config, long)
    samples = torch.tensor(read_wav(long))[None] / 32768
    recognizer = Recognizer.from_checkpoint(load_checkpoint(path))
    found = recognizer(samples, torch.tensor([10 * RATE_HZ]))
    assert found.lengths.item() / 10 == pytest.approx(THREE, rel=0.2)
    assert len({*found.tokens()[0]}) > 10  # it depends on the sound


def test_features_of_the_plain_script_are_ours():
    samples = np.random.default_rng(0).standard_normal(16_123).astype(np.float32) / 10
    ours, lengths = log_mel(torch.tensor(samples)[None], torch.tensor([16_123]))
    config = speaking.FeatureConfig()
    theirs, length = Features(mel_bands(config).numpy())(samples)
    assert length.tolist() == lengths.tolist()
    np.testing.assert_allclose(theirs[0].T, ours[0].numpy(), atol=2e-3)


def test_the_ratio_of_a_program_is_the_time_of_asrkit_over_its_own():
    timings = {
        name: Timing(samples_ms=(ms, 2 * ms), warmup=0, timer="clock")
        for name, ms in ((programs.FIRST, 3.0), ("nemo", 12.0))
    }
    (found,) = programs.ratios("files-ctc", timings, {})
    assert (found.impl, found.value) == ("nemo", 0.25)
    assert found.params["arms"] == [programs.FIRST, "nemo"]


@pytest.mark.live
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the peers: make peers")
def test_files_and_a_cold_command_are_measured_beside_peers_of_the_same_weights(
    long, tmp_path
):
    sounds = speaking.recordings(tmp_path / "sounds", [3.0, 2.0])
    with torch.inference_mode():
        model = speaking.write_ctc(tmp_path / "ctc.safetensors", CTC, long)
    params = {"audio_s": 5.0}
    task = programs.Task(
        kind="ctc", model=model, files=sounds, first=sounds[0], params=params, rounds=1
    )
    models = {programs.FIRST: model, **task.models(str(PYTHON), THEIRS)}
    pythons = {programs.FIRST: sys.executable, **dict.fromkeys(THEIRS, str(PYTHON))}
    assert {*models} == {*pythons}
    by = {(one.impl, one.metric): one for one in programs.files(task, pythons, models)}
    for name in pythons:
        time = by[name, "latency"]
        speed = by[name, "rtfx"]
        assert speed.value == pytest.approx(5e3 / time.value)
        assert by[name, "peak_memory"].value > 2**25
        assert time.params["characters"] > 10
        assert time.params["peer"].startswith(PROGRAMS[name][0])
    same = by["onnxruntime_ctc_float32", "latency"].params["same_texts"]
    assert same == len(sounds)
    cold = [*programs.cold(task, pythons, models)]
    assert {one.impl for one in cold if one.metric == "latency"} == {*pythons}
