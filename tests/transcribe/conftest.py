"""A model that was trained for some seconds, and speech on which overlapping windows are tested."""

import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
import time
from collections import Counter
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import pytest
import soundfile
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from asrkit.cli import main
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    Checkpoint,
    ConvConfig,
    CTCConfig,
    CTCModel,
    TransducerConfig,
    TransducerModel,
    presets,
    save_checkpoint,
)
from asrkit.models.transducer import StatelessConfig
from asrkit.text import CharTokenizer
from asrkit.transcribe import PipelineConfig, Recognizer, WindowOptions, transcribe
from asrkit.transcribe.bulk.shards import rows

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "models")]  # helpers of these tests


@pytest.fixture(autouse=True)
def small_tensors(one_thread):
    """Every test of this folder runs on one thread."""


@pytest.fixture
def break_reading(monkeypatch, tmp_path):
    """From its call on, a recording whose name or bytes end in `poison` ends the process that opens it, `once` does so
    where none has yet, `stuck` is never open, and `odd` is a KeyError, which nothing expects."""
    plain, died = soundfile.SoundFile, tmp_path / "died"

    def open_or_die(file, *args, **how):
        mark = Path(os.fsdecode(file)).stem if isinstance(file, bytes) else ""
        if isinstance(file, io.BytesIO):
            mark = file.getvalue()[-6:].decode(errors="replace")
        if mark.endswith("poison") or (mark.endswith("once") and not died.exists()):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if mark.endswith("stuck"):
            time.sleep(1e6)
        if mark.endswith("odd"):
            raise KeyError("no such header")
        return plain(file, *args, **how)

    return lambda: monkeypatch.setattr(soundfile, "SoundFile", open_or_die)


@pytest.fixture
def forked(tmp_path):
    """Starts a function in a process forked from this one, its streams in files; torch is loaded there already."""
    started = []

    def start(function):
        def run():
            os.setsid()  # a group of its own, as in a terminal
            sys.stdout = (tmp_path / "stdout").open("w", buffering=1)
            sys.stderr = (tmp_path / "stderr").open("w", buffering=1)
            sys.exit(function())

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def learned(tiny_speech):
    """A CTC model that knows six utterances by heart, without normalisation: its output far from an edge is the same in any
    window, so that windows and one piece can be compared to the letter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config, tokenizer, steps = FeatureConfig(normalization="none"), CharTokenizer(), 45
    rows = torch.randint(6, (12, 3)).tolist()
    waves = [torch.cat([tiny_speech.waveforms[n] for n in row]) / 32768 for row in rows]
    texts = [" ".join(tiny_speech.texts[n] for n in row) for row in rows]
    tokens = [*map(tokenizer.encode, texts)]
    targets = torch.tensor([*chain(*tokens)]), torch.tensor([*map(len, tokens)])
    lengths = torch.tensor([*map(len, waves)])
    features = log_mel(pad_sequence(waves, batch_first=True), lengths, config=config)
    encoder = ConvConfig(width=64, layers=3, dropout=0.0)
    model = CTCModel(CTCConfig(vocab_size=tokenizer.vocab_size, encoder=encoder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    for _ in range(steps):
        log_probs, frames = model(*features)
        scores = log_probs.transpose(0, 1)
        loss = F.ctc_loss(scores, targets[0], frames, targets[1], blank=model.blank)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)
    assert loss < 0.1
    return Checkpoint(model.eval(), tokenizer, asdict(config), {})


@pytest.fixture(scope="session")
def learned_transducer(learned, tiny_speech):
    """An RNN-T on the encoder of `learned`: its joint has learned one path: a label where CTC begins one, then blank."""
    torch.manual_seed(0)
    waves = torch.cat([tiny_speech.waveforms[n] for n in torch.randint(6, (36,))]) / 32768  # fmt: skip
    recognizer = Recognizer.from_checkpoint(learned, PipelineConfig(encoder="eager"))
    lengths = torch.tensor([len(waves)])
    encoded, ends = recognizer.encode(*recognizer.features(waves[None], lengths))
    found = recognizer.decode(encoded, ends)
    begun = dict(zip(found.frames[0].tolist(), found.tokens()[0], strict=True))
    blank, nodes = learned.model.blank, []  # frame, labels before, what is emitted
    for frame in range(encoded.shape[1]):
        row = sum(first < frame for first in begun)
        if frame in begun:
            nodes.append((frame, row, begun[frame]))
        nodes.append((frame, row + (frame in begun), blank))
    frames, rows, emitted = torch.tensor(nodes).T
    parts = {"encoder": learned.model.config.encoder, "joint_width": 64}
    config = TransducerConfig(vocab_size=blank, predictor=StatelessConfig(), **parts)
    model = TransducerModel(config)
    model.encoder = learned.model.encoder
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        other = torch.randint(blank, found.labels.shape)
        kept = torch.rand(other.shape) > 0.2
        labels = found.labels.where(kept, other)
        predicted = model.rows(labels)[0, rows]
        halves = model.encoder_projection(encoded[0, frames]), predicted
        loss = F.cross_entropy(model.join(*halves), emitted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3
    return learned._replace(model=model.eval())


@pytest.fixture
def transducer():
    """A transducer of random weights that writes some labels for noise."""
    torch.manual_seed(0)
    model = TransducerModel(presets.tiny(vocab_size=28)).eval()
    return Checkpoint(
        model, CharTokenizer(), asdict(FeatureConfig()), {"max_symbols": 3}
    )


@pytest.fixture(scope="session")
def speech(tiny_speech, tmp_path_factory):
    """Files of the six utterances that `learned` knows."""
    folder = tmp_path_factory.mktemp("speech")
    for n in range(6):
        soundfile.write(
            str(folder / f"{n}.wav"), tiny_speech.waveforms[n].numpy(), 16_000
        )
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def long_file(tiny_speech, tmp_path_factory):
    """Two minutes of them in random order, in one file."""
    order = torch.randint(6, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    path = tmp_path_factory.mktemp("long") / "long.flac"
    soundfile.write(
        str(path), torch.cat([tiny_speech.waveforms[n] for n in order]).numpy(), 16_000
    )
    return path


@pytest.fixture(scope="session")
def model(learned, tmp_path_factory):
    """The trained model as a file."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_checkpoint(path, learned)
    return path


@pytest.fixture
def typed(model, capsys):
    """What `asrkit transcribe` of the trained model, with further arguments, returns: exit code, stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        plain = f"transcribe --model {model} --dtype float32"
        code = main([*plain.split(), *" ".join(map(str, words)).split()])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def other_model(model, tmp_path):
    """The same with another weight."""
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    path = tmp_path / "other.safetensors"
    path.write_bytes(data)
    return path


@pytest.fixture
def talks(speech, long_file, tmp_path):
    """A folder of twelve recordings in two subfolders, of which three cannot be read."""
    folder = tmp_path / "talks"
    for sub in ("a", "b"):
        (folder / sub).mkdir(parents=True)
        for path in speech[:4]:
            shutil.copy(path, folder / sub)
    shutil.copy(long_file, folder)
    (folder / "a" / "empty.wav").touch()
    (folder / "b" / "text.wav").write_text("no sound")
    (folder / "b" / "torn.flac").write_bytes(long_file.read_bytes()[:50_000])
    return folder


@pytest.fixture
def wanted(learned):
    """id -> (text, error) of the recordings below a folder, by `transcribe`."""
    return lambda folder: {
        one.path.relative_to(folder).as_posix(): (one.text, one.error)
        for one in transcribe(learned, folder, options=WindowOptions(batch_s=4.0))
    }


@pytest.fixture
def found():
    """id -> (text, error) of all results in a folder; nothing is there twice."""

    def read(folder):
        results = [*rows(folder)]
        counts = Counter(row["id"] for row in results)
        assert max(counts.values(), default=0) <= 1, counts.most_common(3)
        return {row["id"]: (row["text"], row["error"]) for row in results}

    return read


@pytest.fixture
def make_tar():
    """Writes a WebDataset tar of sound files: (path, {member: bytes}), after a text file."""

    def make(path, members):
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
            for name, data in (("0.json", b"{}"), *members.items()):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return make


@pytest.fixture
def make_manifest():
    """Writes rows as JSON lines: (path, rows)."""

    def make(path, lines):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return make
