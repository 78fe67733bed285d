"""A model that was really trained, for some seconds, on speech that overlapping windows can be tried on."""

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
from pathlib import Path

import pytest
import soundfile
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    Checkpoint,
    ConvConfig,
    CTCConfig,
    CTCModel,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.transcribe import WindowOptions, transcribe
from asrkit.transcribe.shards import rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def small_tensors(one_thread):
    """Every test of this folder runs on one thread."""


@pytest.fixture
def break_reading(monkeypatch):
    """From its call on, recordings named `poison` end the process that opens them, `slow` ones take a while, and `odd` ones are a
    KeyError, which nothing expects."""
    plain = soundfile.SoundFile

    def open_or_die(file, *args, **how):
        name = Path(os.fsdecode(file)).name if isinstance(file, str | bytes) else ""
        if "poison" in name:
            os.kill(os.getpid(), signal.SIGKILL)
        if "slow" in name:
            time.sleep(0.3)
        if "odd" in name:
            raise KeyError("no such header")
        return plain(file, *args, **how)

    return lambda: monkeypatch.setattr(soundfile, "SoundFile", open_or_die)


@pytest.fixture
def forked(tmp_path):
    """Starts a function in a process forked from this one, its streams in files; torch is loaded there already."""

    def start(function):
        def run():
            os.setsid()  # a group of its own, as in a terminal
            sys.stdout = (tmp_path / "stdout").open("w", buffering=1)
            sys.stderr = (tmp_path / "stderr").open("w", buffering=1)
            sys.exit(function())

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        return process

    return start


@pytest.fixture(scope="session")
def learned(tiny_speech):
    """A CTC model that knows six utterances by heart, without normalisation: what it hears far from an edge is the same in any
    window, so that windows and one piece can be compared to the letter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    config, tokenizer, steps = FeatureConfig(normalization="none"), CharTokenizer(), 45
    rows = [torch.randint(6, (3,), generator=generator).tolist() for _ in range(12)]
    waveforms = [
        torch.cat([tiny_speech.waveforms[n] for n in row]).float() / 32768
        for row in rows
    ]
    features, frames = log_mel(
        pad_sequence(waveforms, batch_first=True),
        torch.tensor([*map(len, waveforms)]),
        config=config,
    )
    texts = [
        torch.tensor(tokenizer.encode(" ".join(tiny_speech.texts[n] for n in row)))
        for row in rows
    ]
    targets, sizes = torch.cat(texts), torch.tensor([*map(len, texts)])
    model = CTCModel(
        CTCConfig(
            vocab_size=tokenizer.vocab_size,
            encoder=ConvConfig(width=64, layers=3, dropout=0.0),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    for _ in range(steps):
        log_probs, lengths = model(features, frames)
        loss = F.ctc_loss(
            log_probs.transpose(0, 1), targets, lengths, sizes, blank=model.blank
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)
    assert loss < 0.1
    return Checkpoint(model.eval(), tokenizer, asdict(config), {})


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


# Python imports it at its start. Spawned workers die of a name with `poison`, and open files as slowly as the file `slow_s` says.
FAULTS = """
import os, sys
if "--multiprocessing-fork" in sys.orig_argv:
    import signal, time
    import soundfile
    plain, here = soundfile.SoundFile, os.path.dirname(__file__)

    def open_or_die(file, *args, **how):
        if isinstance(file, (str, bytes)) and "poison" in os.fsdecode(file):
            os.kill(os.getpid(), signal.SIGSEGV)
        with open(os.path.join(here, "slow_s")) as slow_s:
            time.sleep(float(slow_s.read()))
        return plain(file, *args, **how)

    soundfile.SoundFile = open_or_die
"""


class Faults:
    """What goes wrong in spawned workers whose PYTHONPATH begins with `path`."""

    def __init__(self, folder):
        self.folder = folder
        self.path = f"{folder}{os.pathsep}{ROOT}"
        (folder / "sitecustomize.py").write_text(FAULTS)
        self.slow(0)

    def slow(self, seconds):
        """How long workers take to open a file, from now on."""
        written = self.folder / "slow_s.new"
        written.write_text(str(seconds))
        written.replace(self.folder / "slow_s")  # workers read it at any moment


@pytest.fixture(scope="session")
def faults(tmp_path_factory):
    """Faults of spawned workers."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def model(learned, tmp_path_factory):
    """The trained model as a file."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_checkpoint(path, learned)
    return path


@pytest.fixture
def talks(speech, long_file, tmp_path):
    """A folder of twelve recordings in two subfolders, of which three cannot be read."""
    folder = tmp_path / "talks"
    for sub in "ab":
        (folder / sub).mkdir(parents=True)
        for path in speech[:4]:
            shutil.copy(path, folder / sub / path.name)
    shutil.copy(long_file, folder / "long.flac")
    (folder / "a" / "empty.wav").touch()
    (folder / "b" / "text.wav").write_text("no sound")
    whole = (folder / "long.flac").read_bytes()
    (folder / "b" / "torn.flac").write_bytes(whole[: len(whole) // 2])
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
    """Writes a WebDataset tar of sound files: (path, {member: bytes}), a .json beside each."""

    def add(tar, name, data):
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))

    def make(path, members):
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
            for name, data in members.items():
                add(tar, name, data)
                add(tar, f"{name.rpartition('.')[0]}.json", b'{"text": "not read"}')
        return path

    return make


@pytest.fixture
def make_manifest():
    """Writes rows as JSON lines: (path, rows)."""

    def make(path, lines):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return make
