"""A trained model as a file, and folders, manifests and containers of what it knows."""

import io
import json
import shutil
import tarfile
from collections import Counter

import pytest

from asrkit.models import save_checkpoint
from asrkit.transcribe import WindowOptions, transcribe
from asrkit.transcribe.bulk import Task, rows


@pytest.fixture(scope="session")
def model(learned, tmp_path_factory):
    """The trained model as a file."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_checkpoint(path, learned)
    return path


@pytest.fixture
def task(model):
    """What is done with every recording: tiny batches, one reader."""
    return Task(model=model, windows=WindowOptions(batch_s=4.0, readers=1))


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
def wanted(learned, task):
    """id -> (text, error) of the recordings below a folder, by `transcribe`."""

    def heard(folder):
        return {
            one.path.relative_to(folder).as_posix(): (one.text, one.error)
            for one in transcribe(learned, folder, options=task.windows)
        }

    return heard


def found(folder):
    """id -> (text, error) of all results in a folder; nothing is there twice."""
    results = [*rows(folder)]
    counts = Counter(row["id"] for row in results)
    assert max(counts.values(), default=0) <= 1, counts.most_common(3)
    return {row["id"]: (row["text"], row["error"]) for row in results}


@pytest.fixture(name="found")
def found_fixture():
    """`found`, for tests that import nothing from here."""
    return found


def add(tar, name, data):
    """Add a file of these bytes to an open tar."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def make_tar():
    """Writes a WebDataset tar of sound files: (path, {member: bytes}), a .json beside each."""

    def make(path, members):
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
            for name, data in members.items():
                add(tar, name, data)
                add(
                    tar,
                    name.rpartition(".")[0] + ".json",
                    b'{"text": "nobody reads this"}',
                )
        return path

    return make


@pytest.fixture
def make_manifest():
    """Writes rows as JSON lines: (path, rows)."""

    def make(path, lines):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return make
