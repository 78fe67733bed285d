"""`asrkit export` and `asrkit transcribe --engine` on a model that was trained on spoken digits, and sherpa-onnx on what left."""

import hashlib
import json
import math
import shutil

import pytest
import soundfile
import torch

from asrkit.data import Utterances, corpora
from asrkit.export.folder import MANIFEST
from asrkit.models import LSTMConfig, TransducerConfig, load_checkpoint
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, train
from asrkit.transcribe import transcribe

pytestmark = pytest.mark.slow

KINDS = {
    "rnnt": {"predictor": LSTMConfig(width=64)},
    "tdt": {"durations": (0, 1, 2, 4)},
}
EXPORTS = [("rnnt", "transducer"), ("tdt", "transducer"), ("tdt", "ctc")]
ENGINES = ("onnxruntime", "openvino")
STEPS = 250


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Spoken digits to train on, and of other voices to test with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASRKIT_HOME", str(tmp_path_factory.mktemp("home")))
        cuts = corpora.spoken_commands(
            train=900, dev=3, test=90, kinds=["digits"], progress=False
        )
        return {
            split: Utterances.load(cuts[split], progress=False)
            for split in ("train", "test")
        }


@pytest.fixture(scope="session")
def recordings(digits, tmp_path_factory):
    """The test set as files."""
    folder = tmp_path_factory.mktemp("recordings")
    for number, samples in enumerate(digits["test"].waveforms):
        soundfile.write(str(folder / f"{number:03}.wav"), samples.numpy(), 16_000)
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def trained(digits, tmp_path_factory):
    """trained[kind]: the folder of a transducer with a CTC head that has learned digits."""
    folders = {}
    before = torch.get_num_threads()
    for kind, changes in KINDS.items():
        folders[kind] = tmp_path_factory.mktemp(kind) / "model"
        config = TransducerConfig(vocab_size=28, **changes)
        settings = TrainConfig(steps=STEPS, seconds=math.inf, threads=1)
        train(
            config,
            CharTokenizer(),
            digits["train"],
            out=folders[kind],
            config=settings,
            progress=False,
        )
    torch.set_num_threads(before)
    return folders


@pytest.fixture(scope="session")
def exported(trained, commands, tmp_path_factory):
    """exported[kind, head]: (result of `asrkit export --json`, its folder)."""
    base = tmp_path_factory.mktemp("exported")
    folders = {(kind, head): base / f"{kind}-{head}" for kind, head in EXPORTS}
    done = commands(
        *[
            ["export", "--model", trained[kind], "--format", "onnx", "--head", head, "--out", folder, "--json"]
            for (kind, head), folder in folders.items()
        ]
    )  # fmt: skip
    found = {}
    for (key, folder), (code, out, err) in zip(folders.items(), done, strict=True):
        assert code == 0, err
        found[key] = (json.loads(out), folder)
    return found


@pytest.fixture(scope="session")
def by_engines(exported, recordings, commands):
    """by_engines[kind, head, engine]: what `asrkit transcribe` writes of each recording."""
    keys = [(*key, engine) for key in EXPORTS for engine in ENGINES]
    done = commands(
        *[
            ["transcribe", "--dtype", "float32", *recordings, "--model", exported[kind, head][1], "--engine", engine, "--json", "--threads", "1"]
            for kind, head, engine in keys
        ]
    )  # fmt: skip
    found = {}
    for key, (code, out, err) in zip(keys, done, strict=True):
        assert code == 0, err
        found[key] = [json.loads(line)["text"] for line in out.splitlines()]
    return found


@pytest.fixture(scope="session")
def ours(trained, recordings, exported):
    """ours[kind, head]: what `asrkit transcribe` writes of each recording."""
    found = {}
    for kind, head in EXPORTS:
        checkpoint = load_checkpoint(trained[kind])
        if head == "ctc":
            checkpoint = as_ctc(checkpoint)
        found[kind, head] = [one.text for one in transcribe(checkpoint, recordings)]
    return found


@pytest.fixture(scope="session")
def by_client(exported, recordings, in_peers, client_script):
    """by_client[kind, head]: what sherpa-onnx writes of each recording."""
    folders = [exported[key][1] for key in EXPORTS]
    done = in_peers("-P", client_script, "client", recordings[0].parent, *folders)
    assert done.returncode == 0, done.stderr[-2000:]
    texts = map(json.loads, done.stdout.splitlines())
    return dict(zip(EXPORTS, texts, strict=True))


def as_ctc(checkpoint):
    """The CTC model that a transducer's encoder and CTC head make."""
    from asrkit.models import CTCConfig, CTCModel

    config = checkpoint.model.config
    model = CTCModel(CTCConfig(vocab_size=config.vocab_size, encoder=config.encoder))
    model.encoder = checkpoint.model.encoder
    model.output = checkpoint.model.ctc_head
    return checkpoint._replace(model=model.eval())


def test_export_lists_its_files(exported):
    result, folder = exported["rnnt", "transducer"]
    assert result["files"] == [
        "decoder.onnx",
        "decoding.safetensors",
        "encoder.onnx",
        "joiner.onnx",
        "tokens.txt",
    ]
    assert result["head"] == "transducer" and result["format"] == "onnx"
    assert {path.name for path in folder.iterdir()} == {*result["files"], "asrkit.json"}
    assert exported["tdt", "ctc"][0]["files"] == ["model.onnx", "tokens.txt"]


@pytest.mark.parametrize("kind, head", EXPORTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_transcribe_writes_the_same_whatever_computes_the_encoder(
    by_engines, ours, kind, head, engine
):
    texts = by_engines[kind, head, engine]
    assert texts == ours[kind, head]
    assert len({*texts}) > 5


def test_a_graph_that_an_engine_cannot_read_is_one_line(
    exported, recordings, commands, tmp_path
):
    _, folder = exported["tdt", "ctc"]
    broken = shutil.copytree(folder, tmp_path / "broken")
    size = (broken / "model.onnx").stat().st_size
    (broken / "model.onnx").write_bytes(bytes(size))
    manifest = json.loads((broken / MANIFEST).read_text())
    manifest["files"]["model.onnx"]["sha256"] = hashlib.sha256(bytes(size)).hexdigest()
    (broken / MANIFEST).write_text(json.dumps(manifest))
    command = [
        "transcribe",
        "--dtype",
        "float32",
        recordings[0],
        "--model",
        broken,
        "--engine",
    ]
    done = commands(*[[*command, engine] for engine in ENGINES])
    for (code, _, err), engine in zip(done, ENGINES, strict=True):
        assert code == 2
        *_, last = err.splitlines()
        assert last.startswith(
            f"asrkit transcribe: model: {engine} cannot read model.onnx ("
        )


def test_what_export_refuses_leaves_nothing_behind(trained, commands, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    command = ["export", "--model", trained["tdt"], "--format", "onnx"]
    done = commands(
        [*command, "--opset", "9", "--out", tmp_path / "out"],
        [*command, "--out", tmp_path / "taken"],
    )
    said = (
        "asrkit export: --opset: expected 18 to 23, got 9",
        "asrkit export: --out: expected a folder that is not there yet or is empty, got ",
    )
    for (code, _, err), wanted in zip(done, said, strict=True):
        assert code == 2 and err.count("\n") == 1, err
        assert err.startswith(wanted)
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "mine"]


@pytest.mark.parametrize("kind, head", EXPORTS)
def test_sherpa_onnx_reads_what_left_and_writes_nearly_what_we_write(
    by_client, ours, kind, head
):
    client = [" ".join(text.split()) for text in by_client[kind, head]]
    differ = sum(one != two for one, two in zip(client, ours[kind, head], strict=True))
    # its features are not ours, and the model was trained for seconds
    assert differ <= 0.7 * len(client) and len({*client}) > 5
    assert len({*client}) > 5
