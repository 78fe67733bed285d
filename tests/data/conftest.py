"""Small synthetic corpora, and an $ASRKIT_HOME for each test."""

import http.server
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from asrkit.data import Utterances


@pytest.fixture(autouse=True)
def small_tensors(one_thread):
    """Every test of this folder runs on one thread."""


@pytest.fixture
def a_home(tmp_path, monkeypatch):
    """An empty $ASRKIT_HOME."""
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def utterances():
    """A hundred utterances of 0.05 to 5 s, each sample equal to the utterance's number + 1."""
    samples = torch.randint(
        800, 80_000, (100,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return Utterances(
        waveforms=[
            torch.full((size,), n + 1, dtype=torch.int16)
            for n, size in enumerate(samples)
        ],
        ids=[f"u{n}" for n in range(100)],
        texts=["a" * (n % 7) for n in range(100)],
        speakers=["s"] * 100,
    )


@pytest.fixture
def mirror(monkeypatch, tmp_path):
    """An HTTP server of the files in `folder`; `requests` has the requested paths."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = SimpleNamespace(folder=tmp_path / "mirror", requests=[])

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=state.folder)

        def log_message(self, *args):
            """Keep stderr clean."""

        def do_GET(self):
            state.requests.append(self.path)
            super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        state.close = server.shutdown
        yield state
        server.shutdown()


@pytest.fixture
def speak():
    """`speak(path, seconds, rate_hz)`: a sound file of noise."""

    def write(path, seconds, rate_hz=16_000):
        path.parent.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(int(seconds * 1000))
        soundfile.write(path, random.normal(0, 0.1, int(seconds * rate_hz)), rate_hz)

    return write


@pytest.fixture
def libri(tmp_path, speak):
    """`make(part)`: a folder of four utterances of two speakers in LibriSpeech's layout, 0.3 to 0.6 s."""

    def make(part):
        root = tmp_path / "source/LibriSpeech" / part
        for first, speaker in ((0.3, "19"), (0.5, "84")):
            folder = root / speaker / "7"
            speak(folder / f"{speaker}-7-0000.flac", first)
            speak(folder / f"{speaker}-7-0001.flac", first + 0.1)
            lines = (
                f"{speaker}-7-0000 HELLO WORLD\n{speaker}-7-0001 HELLO WORLD AGAIN\n"
            )
            (folder / f"{speaker}-7.trans.txt").write_text(lines)
        return root

    return make
