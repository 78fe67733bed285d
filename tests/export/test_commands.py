"""`asrkit export` and `asrkit transcribe --engine` with a model that was trained on spoken digits, and sherpa-onnx with the exported folder."""

import json
import math

import pytest
import soundfile
import torch

from asrkit.data import Utterances, corpora
from asrkit.models import LSTMConfig, TransducerConfig, load_checkpoint, presets
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, train
from asrkit.transcribe import transcribe

pytestmark = pytest.mark.live

ENGINES = ("onnxruntime", "openvino")
FILES = {
    "transducer": ["decoder.onnx", "decoding.safetensors", "encoder.onnx", "joiner.onnx", "tokens.txt"],
    "ctc": ["decoding.safetensors", "model.onnx", "tokens.txt"],
}  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A TDT model with a CTC head trained on spoken digits, and recordings of other voices."""
    base = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASRKIT_HOME", str(base / "home"))
        how = {"kinds": ["digits"], "progress": False}
        cuts = corpora.spoken_commands(train=900, dev=3, test=90, **how)
    digits = Utterances.load(cuts["train"], progress=False)
    others = Utterances.load(cuts["test"], progress=False)
    config = TransducerConfig(
        vocab_size=28, predictor=LSTMConfig(width=64), durations=presets.TDT
    )
    how = {
        "config": TrainConfig(steps=250, seconds=math.inf, threads=1),
        "progress": False,
    }
    train(config, CharTokenizer(), digits, out=base / "model", **how)
    torch.set_num_threads(1)
    (base / "recordings").mkdir()
    for number, samples in enumerate(others.waveforms):
        path = base / "recordings" / f"{number:03}.wav"
        soundfile.write(str(path), samples.numpy(), 16_000)
    return base


@pytest.fixture(scope="session")
def recordings(trained):
    return sorted((trained / "recordings").iterdir())


@pytest.fixture(scope="session")
def exported(trained, commands):
    """exported[head]: the folder of `asrkit export`."""
    command = ["export", "--model", trained / "model", "--format", "onnx", "--json"]
    folders = {head: trained / head for head in FILES}
    heads = [[*command, "--head", head, "--out", trained / head] for head in FILES]
    for (code, out, err), (head, folder) in zip(
        commands(*heads), folders.items(), strict=True
    ):
        assert code == 0, err
        assert json.loads(out)["files"] == FILES[head]
        assert sorted(path.name for path in folder.iterdir()) == FILES[head]
    return folders


@pytest.fixture(scope="session")
def ours(trained, recordings):
    """The output of `transcribe` for each recording."""
    checkpoint = load_checkpoint(trained / "model")
    return [one.text for one in transcribe(checkpoint, recordings)]


def test_transcribe_writes_the_same_whatever_computes_the_encoder(
    exported, recordings, ours, commands
):
    command = ["transcribe", *recordings, "--json", "--threads", 1, "--model"]
    command += [exported["transducer"], "--engine"]
    for code, out, err in commands(*[[*command, engine] for engine in ENGINES]):
        assert code == 0, err
        assert [json.loads(line)["text"] for line in out.splitlines()] == ours
    assert len({*ours}) > 5


def test_sherpa_onnx_reads_exports_and_writes_nearly_the_same(
    exported, recordings, ours, in_peers, worker
):
    folder = recordings[0].parent
    done = in_peers("-P", worker.__file__, "client", folder, *exported.values())
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        client = [" ".join(text.split()) for text in json.loads(line)]
        differ = sum(one != two for one, two in zip(client, ours, strict=True))
        # its features are not ours, and the model was trained for seconds
        assert differ <= 0.7 * len(client)
        assert len({*client}) > 5
