"""Hostile files: any sound, checkpoint, manifest or ARPA file is read or refused in one line.

`make test` tries some dozens of files of each kind, the same each time; HYPOTHESIS_PROFILE=nightly tries thousands of new ones.
"""

import gzip
import json
import os
import shutil
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asrkit.data import Utterances, corpora
from asrkit.data.corpora.manifests import transcribed_cut
from asrkit.decoders import NGram
from asrkit.features import FeatureConfig
from asrkit.models import (
    Checkpoint,
    ConvConfig,
    CTCConfig,
    CTCModel,
    load_checkpoint,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.transcribe.audio import read_audio

sys.path.append(str(Path(__file__).resolve().parent / "models"))
sys.path.append(str(Path(__file__).resolve().parent / "transcribe"))
import ctranslate2_files
from encoded import encode

# Hypothesis warns when it prints a failure whose fixtures are bytes of files
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
# a second or two for each kind of file
fuzzed = settings(
    settings()
    if NIGHTLY
    else settings(max_examples=40, derandomize=True, database=None),
    suppress_health_check=[*HealthCheck],
)
SOUNDS = {
    "wav": "PCM_16", "aiff": "PCM_16", "au": "PCM_16", "caf": "PCM_16", "w64": "PCM_16", "flac": "PCM_16",
    "ogg": "VORBIS", "opus": "OPUS", "mp3": "MPEG_LAYER_III",
}  # fmt: skip
CODECS = {
    "m4a": "aac",
    "webm": "libopus",
    "aac": "aac",
}  # encoders of FFmpeg's libraries
EXTREMES = [0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
FILES = [*(f"a.{suffix}" for suffix in (*SOUNDS, *CODECS)), *"model.safetensors model.nemo model.bin m.jsonl m.jsonl.gz lm.arpa lm.arpa.gz".split()]  # fmt: skip
ARPA = """\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.0\t<s>\t-0.3
-0.7\ta\t-0.2
-0.6\tb\t0.1
-0.9\t</s>

\\2-grams:
-0.4\ta b
-0.5\tb </s>

\\end\\
"""


@st.composite
def damage(draw):
    """A function that damages some places of bytes, mostly near the beginning, in headers."""
    places = st.integers(0, 200) | st.integers(0, 2**31)
    edits = draw(st.lists(st.tuples(places, st.sampled_from("set cut insert number".split())), max_size=4, min_size=1))  # fmt: skip
    junk = [draw(st.binary(min_size=1, max_size=8)) for _ in edits]
    number = st.builds(int.to_bytes, st.sampled_from(EXTREMES), st.just(8), st.sampled_from(["big", "little"]))  # fmt: skip
    numbers = [draw(number) for _ in edits]

    def apply(data):
        data = bytearray(data)
        for (place, kind), some, number in zip(edits, junk, numbers, strict=True):
            at = place % (len(data) + 1)
            if kind == "set":
                data[at : at + len(some)] = some
            elif kind == "cut":
                del data[at:]
            elif kind == "insert":
                data[at:at] = some
            else:
                data[at : at + 4] = number[:4] if place % 2 else number[4:]
        return bytes(data)

    return apply


@st.composite
def odd(draw, tree):
    """A copy of a JSON tree with another value at one place."""
    tree = place = json.loads(json.dumps(tree))
    while True:
        keys = [*place] if isinstance(place, dict) else [*range(len(place))]
        key = draw(st.sampled_from(keys))
        inner = place[key]
        is_leaf = not inner or not isinstance(inner, dict | list)
        if is_leaf or draw(st.booleans()):
            place[key] = draw(JSON)
            return tree
        place = inner


def read(path):
    """Result of asrkit's reader for a file of this name."""
    if ".arpa" in path.suffixes:
        NGram.read(path, ["a", "b", "c"])
    elif ".jsonl" in path.suffixes:
        Utterances.load(corpora.from_manifest(path), progress=False)
    elif path.suffix == ".bin":  # in a folder
        shutil.copy(path, path.parent / "whisper/model.bin")
        load_checkpoint(path.parent / "whisper")
    elif path.stem.endswith("model"):
        load_checkpoint(path)
    else:
        assert read_audio(path, 16_000).isfinite().all()


def read_or_refused(path, data):
    """Write a file and read it. The only valid error is a refusal in one line."""
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from lhotse and torch
        try:
            read(path)
        except ValueError as error:
            refusal = error
        else:
            return
    message = str(refusal)
    assert (
        type(refusal) is ValueError and "\n" not in message and len(message) < 1500
    ), message
    assert ": " in message or " is not " in message, message


@pytest.fixture(scope="module")
def rows(folder):
    """Lines of manifests for a sound: ours, NeMo's and lhotse's."""
    from lhotse import Recording

    ours = {"audio": "a.wav", "text": "one", "id": "x", "speaker": "s", "split": "train"}  # fmt: skip
    theirs = {"audio_filepath": "a.wav", "text": "one", "duration": 0.2, "offset": 0.01}
    cut = transcribed_cut(
        Recording.from_file(folder / "a.wav").to_cut(), "one", "s", {}
    )
    return [ours, theirs, cut.to_dict()]


@pytest.fixture(scope="module")
def folder(archive, tmp_path_factory):
    """An intact sound of each format, and three models."""
    folder = tmp_path_factory.mktemp("whole")
    noise = np.random.default_rng(0).normal(size=4000) * 0.1
    for suffix, subtype in SOUNDS.items():
        how = {"subtype": subtype, "format": "OGG" if suffix == "opus" else None}
        soundfile.write(folder / f"a.{suffix}", noise, 16_000, **how)
    for suffix, codec in CODECS.items():
        kind = "adts" if suffix == "aac" else None
        encode(folder / f"a.{suffix}", kind, codec, wave=noise)
    tokenizer, encoder = CharTokenizer(), ConvConfig(width=8, layers=1)
    config = CTCConfig(vocab_size=tokenizer.vocab_size, encoder=encoder)
    checkpoint = Checkpoint(CTCModel(config), tokenizer, asdict(FeatureConfig()), {})
    save_checkpoint(folder / "model.safetensors", checkpoint)
    shutil.copy(archive, folder / "model.nemo")
    model = ctranslate2_files.whisper(folder / "whisper", "whisper-en")
    shutil.copy(model / "model.bin", folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder, rows):
    """The bytes of intact files by name. One of each kind is read."""
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "lm.arpa").write_text(ARPA)
    for name in ("m.jsonl", "lm.arpa"):
        packed = gzip.compress((folder / name).read_bytes(), mtime=0)
        (folder / f"{name}.gz").write_bytes(packed)
    for name in FILES:
        read(folder / name)
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("name", FILES)
@fuzzed
@given(harm=damage())
def test_a_damaged_file_is_read_or_refused(folder, whole, name, harm):
    read_or_refused(folder / f"damaged-{name}", harm(whole[name]))


@fuzzed
@given(data=st.data())
def test_a_checkpoint_with_odd_values_in_its_header_is_read_or_refused(
    folder, whole, data
):
    checkpoint = whole["model.safetensors"]
    size = int.from_bytes(checkpoint[:8], "little")
    outer = json.loads(checkpoint[8 : 8 + size])
    header = json.loads(outer["__metadata__"]["asrkit"])
    outer["__metadata__"]["asrkit"] = json.dumps(data.draw(odd(header)))
    packed = json.dumps(outer).encode()
    changed = len(packed).to_bytes(8, "little") + packed + checkpoint[8 + size :]
    read_or_refused(folder / "odd-model.safetensors", changed)


@fuzzed
@given(data=st.data())
def test_a_manifest_with_odd_values_is_read_or_refused(folder, rows, data):
    row = data.draw(odd(data.draw(st.sampled_from(rows))))
    read_or_refused(folder / "odd.jsonl", json.dumps(row).encode())
