"""`asrkit export` and `asrkit transcribe --engine` on a model that was trained on spoken digits, and sherpa-onnx on what left."""

import json
import math
import shutil

import pytest
import soundfile
import torch

from asrkit.data import Utterances, corpora
from asrkit.models import LSTMConfig, TransducerConfig, load_checkpoint, presets
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, train
from asrkit.transcribe import transcribe

pytestmark = pytest.mark.live

HEADS = ("transducer", "ctc")
ENGINES = ("onnxruntime", "openvino")
FILES = {
    "transducer": ["decoder.onnx", "decoding.safetensors", "encoder.onnx", "joiner.onnx", "tokens.txt"],
    "ctc": ["decoding.safetensors", "model.onnx", "tokens.txt"],
}  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A TDT model with a CTC head that has learned spoken digits, and recordings of other voices."""
    base = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASRKIT_HOME", str(base / "home"))
        cuts = corpora.spoken_commands(
            train=900, dev=3, test=90, kinds=["digits"], progress=False
        )
        digits, others = (
            Utterances.load(cuts[split], progress=False) for split in ("train", "test")
        )
    config = TransducerConfig(
        vocab_size=28, predictor=LSTMConfig(width=64), durations=presets.TDT
    )
    settings = TrainConfig(steps=250, seconds=math.inf, threads=1)
    before = torch.get_num_threads()
    train(
        config,
        CharTokenizer(),
        digits,
        out=base / "model",
        config=settings,
        progress=False,
    )
    torch.set_num_threads(before)
    (base / "recordings").mkdir()
    for number, samples in enumerate(others.waveforms):
        path = base / "recordings" / f"{number:03}.wav"
        soundfile.write(str(path), samples.numpy(), 16_000)
    return base


@pytest.fixture(scope="session")
def exported(trained, commands):
    """exported[head]: the folder of `asrkit export`."""
    folders = {head: trained / head for head in HEADS}
    command = ["export", "--model", trained / "model", "--format", "onnx", "--json"]
    done = commands(
        *[
            [*command, "--head", head, "--out", folder]
            for head, folder in folders.items()
        ]
    )
    for (code, out, err), (head, folder) in zip(done, folders.items(), strict=True):
        assert code == 0, err
        assert json.loads(out)["files"] == FILES[head]
        assert sorted(path.name for path in folder.iterdir()) == FILES[head]
    return folders


@pytest.fixture(scope="session")
def ours(trained):
    """What `transcribe` writes of each recording."""
    recordings = sorted((trained / "recordings").iterdir())
    checkpoint = load_checkpoint(trained / "model")
    return [one.text for one in transcribe(checkpoint, recordings)]


def test_transcribe_writes_the_same_whatever_computes_the_encoder(
    exported, trained, ours, commands
):
    command = ["transcribe", *sorted((trained / "recordings").iterdir()), "--json"]
    command += ["--threads", 1, "--model", exported["transducer"], "--engine"]
    done = commands(*[[*command, engine] for engine in ENGINES])
    for code, out, err in done:
        assert code == 0, err
        assert [json.loads(line)["text"] for line in out.splitlines()] == ours
    assert len({*ours}) > 5


def test_a_damaged_graph_is_one_line_and_export_refuses_a_folder_that_is_taken(
    exported, trained, commands, tmp_path
):
    broken = shutil.copytree(exported["ctc"], tmp_path / "broken")
    graph = broken / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1000])
    recording = trained / "recordings" / "000.wav"
    command = ["transcribe", recording, "--model", broken, "--engine"]
    (code, _, taken), *done = commands(
        ["export", "--model", trained / "model", "--format", "onnx", "--out", broken],
        *[[*command, engine] for engine in ENGINES],
    )
    assert code == 2 and taken.startswith(
        "asrkit export: --out: expected a folder that is not there yet or is empty, got "
    )
    for (code, _, err), engine in zip(done, ENGINES, strict=True):
        assert code == 2
        assert err.splitlines()[-1].startswith(
            f"asrkit transcribe: --model: expected an export that {engine} reads, got "
        )


def test_sherpa_onnx_reads_what_left_and_writes_nearly_what_we_write(
    exported, trained, ours, in_peers, worker
):
    recordings = trained / "recordings"
    done = in_peers("-P", worker.__file__, "client", recordings, *exported.values())
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        client = [" ".join(text.split()) for text in json.loads(line)]
        differ = sum(one != two for one, two in zip(client, ours, strict=True))
        # its features are not ours, and the model was trained for seconds
        assert differ <= 0.7 * len(client)
        assert len({*client}) > 5
