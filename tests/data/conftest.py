"""Small synthetic corpora, and a home of their own for each test."""

import http.server
import io
import tarfile
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
def mirror(monkeypatch):
    """An HTTP server: `files` by path, `asked`: paths."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = SimpleNamespace(files={}, asked=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            """Not on stderr."""

        def do_GET(self):
            state.asked.append(self.path)
            body = state.files.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url, state.close = (
            f"http://127.0.0.1:{server.server_port}",
            server.shutdown,
        )
        yield state
        server.shutdown()


@pytest.fixture
def speak():
    """`speak(path, seconds, rate_hz)`: a sound file of noise."""

    def write(path, seconds, rate_hz=16_000):
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(
            path,
            np.random.default_rng(int(seconds * 1000)).normal(
                0, 0.1, int(seconds * rate_hz)
            ),
            rate_hz,
        )

    return write


@pytest.fixture
def libri(tmp_path, speak):
    """`make(part)`: a folder of four utterances of two speakers in LibriSpeech's layout, 0.3 to 0.6 s, and its archive."""

    def make(part, root=tmp_path / "source" / "LibriSpeech"):
        seconds = iter((0.3, 0.4, 0.5, 0.6))
        for speaker in ("19", "84"):
            names = [f"{speaker}-7-000{n}" for n in range(2)]
            for name in names:
                speak(root / part / speaker / "7" / f"{name}.flac", next(seconds))
            text = "".join(
                f"{name} HELLO WORLD {'AGAIN ' * n}\n" for n, name in enumerate(names)
            )
            (root / part / speaker / "7" / f"{speaker}-7.trans.txt").write_text(text)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.add(root / part, f"LibriSpeech/{part}")
        return root / part, packed.getvalue()

    return make
