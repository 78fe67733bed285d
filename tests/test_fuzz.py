"""Hostile files: whatever a sound, a checkpoint, a manifest or an ARPA file holds, it is read or refused in one line.

`make test` tries some dozens of files of each kind, the same each time; HYPOTHESIS_PROFILE=nightly tries thousands of new ones.
"""

import gzip
import json
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asrkit.data import Utterances, corpora
from asrkit.data.corpora.manifests import transcribed_cut
from asrkit.decoders import NGram
from asrkit.features import FeatureConfig, mel_bands
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

sys.path.append(str(Path(__file__).parent / "models"))
import parity_cases

# Of a failure that is printed: its fixtures are bytes of files.
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
EXTREMES = [
    0,
    1,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63,
    2**64 - 1,
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
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
    """A function of bytes that damages some places of them, most near the beginning: there are headers."""
    places = st.integers(0, 200) | st.integers(0, 2**31)
    edits = draw(st.lists(st.tuples(places, st.sampled_from("set cut insert number".split())), max_size=4, min_size=1))  # fmt: skip
    junk = [draw(st.binary(min_size=1, max_size=8)) for _ in edits]
    numbers = [
        draw(st.sampled_from(EXTREMES)).to_bytes(
            8, draw(st.sampled_from(["big", "little"]))
        )
        for _ in edits
    ]

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


def read_or_refused(read, *arguments):
    """What `read` returns; None where it refuses in one line. Anything else that it raises is a defect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lhotse and torch
        try:
            return read(*arguments)
        except ValueError as error:
            refusal = error
    message = str(refusal)
    assert (
        type(refusal) is ValueError and "\n" not in message and len(message) < 1500
    ), message
    assert ": " in message or " is not " in message, message
    return None


@pytest.fixture(scope="module")
def sounds():
    """The bytes of a whole file of each format."""
    noise = np.random.default_rng(0).normal(size=4000) * 0.1
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for suffix, subtype in SOUNDS.items():
            path = Path(folder, f"a.{suffix}")
            kind = "OGG" if suffix == "opus" else None
            soundfile.write(path, noise, 16_000, subtype=subtype, format=kind)
            made[suffix] = path.read_bytes()
    return made


@fuzzed
@given(harm=damage(), suffix=st.sampled_from(sorted(SOUNDS)))
def test_a_damaged_sound_is_read_or_refused(sounds, tmp_path_factory, harm, suffix):
    path = tmp_path_factory.getbasetemp() / f"fuzz.{suffix}"
    path.write_bytes(harm(sounds[suffix]))
    samples = read_or_refused(read_audio, path, 16_000)
    assert samples is None or bool(samples.isfinite().all())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The bytes of a small checkpoint of ours."""
    tokenizer = CharTokenizer()
    config = CTCConfig(
        vocab_size=tokenizer.vocab_size, encoder=ConvConfig(width=8, layers=1)
    )
    made = Checkpoint(CTCModel(config), tokenizer, asdict(FeatureConfig()), {})
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_checkpoint(path, made)
    return path.read_bytes()


@fuzzed
@given(harm=damage())
def test_a_damaged_checkpoint_is_read_or_refused(checkpoint, tmp_path_factory, harm):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(harm(checkpoint))
    read_or_refused(load_checkpoint, path)


def sections(tree):
    """All dicts of nested dicts, the outermost first."""
    found = [tree]
    for key in sorted(tree):
        if isinstance(tree[key], dict) and tree[key]:
            found += sections(tree[key])
    return found


@fuzzed
@given(section=st.integers(0, 99), field=st.integers(0, 99), value=JSON)
def test_a_checkpoint_with_odd_values_in_its_header_is_read_or_refused(
    checkpoint, tmp_path_factory, section, field, value
):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    size = int.from_bytes(checkpoint[:8], "little")
    outer = json.loads(checkpoint[8 : 8 + size])
    header = json.loads(outer["__metadata__"]["asrkit"])
    places = sections(header)
    place = places[section % len(places)]
    place[sorted(place)[field % len(place)]] = value
    outer["__metadata__"]["asrkit"] = json.dumps(header)
    packed = json.dumps(outer).encode()
    path.write_bytes(
        len(packed).to_bytes(8, "little") + packed + checkpoint[8 + size :]
    )
    read_or_refused(load_checkpoint, path)


@pytest.fixture(scope="module")
def nemo(tmp_path_factory):
    """The bytes of a small archive of NeMo."""
    case = parity_cases.golden_cases()["ctc"]
    golden = Path(__file__).parent / "golden" / "nemo.json"
    shapes = json.loads(golden.read_text())["ctc"]["shapes"]
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    weights["preprocessor.featurizer.window"] = torch.hann_window(400, periodic=False)
    weights["preprocessor.featurizer.fb"] = mel_bands(FeatureConfig()).T[None]
    weights = parity_cases.fill(weights)
    path = tmp_path_factory.mktemp("nemo") / "model.nemo"
    parity_cases.write_nemo(path, parity_cases.nemo_config(case), weights)
    load_checkpoint(path)
    return path.read_bytes()


@fuzzed
@given(harm=damage())
def test_a_damaged_archive_is_read_or_refused(nemo, tmp_path_factory, harm):
    path = tmp_path_factory.getbasetemp() / "fuzz.nemo"
    path.write_bytes(harm(nemo))
    read_or_refused(load_checkpoint, path)


def read_manifest(path):
    return Utterances.load(corpora.from_manifest(path), progress=False)


@pytest.fixture(scope="module")
def spoken(sounds, tmp_path_factory):
    """A folder with a sound, and lines of manifests for it: ours, NeMo's and lhotse's."""
    from lhotse import Recording

    folder = tmp_path_factory.mktemp("manifests")
    (folder / "a.wav").write_bytes(sounds["wav"])
    ours = {
        "audio": "a.wav",
        "text": "one",
        "id": "x",
        "speaker": "s",
        "split": "train",
    }
    theirs = {"audio_filepath": "a.wav", "text": "one", "duration": 0.2, "offset": 0.01}
    cut = transcribed_cut(Recording.from_file(folder / "a.wav"), "one", "s", {})
    return folder, [ours, theirs, cut.to_dict()]


@fuzzed
@given(data=st.data())
def test_a_manifest_with_odd_values_is_read_or_refused(spoken, data):
    folder, rows = spoken
    row = json.loads(json.dumps(data.draw(st.sampled_from(rows))))
    place = row
    while True:
        key = data.draw(st.sampled_from([*place] if isinstance(place, dict) else [0]))
        if (
            not isinstance(place[key], dict | list)
            or not place[key]
            or data.draw(st.booleans())
        ):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    (folder / "m.jsonl").write_text(json.dumps(row))
    read_or_refused(read_manifest, folder / "m.jsonl")


@fuzzed
@given(harm=damage(), packed=st.booleans())
def test_a_damaged_manifest_is_read_or_refused(spoken, harm, packed):
    folder, rows = spoken
    text = "\n".join(json.dumps(row) for row in rows).encode()
    path = folder / ("m.jsonl.gz" if packed else "m.jsonl")
    path.write_bytes(harm(gzip.compress(text, mtime=0) if packed else text))
    read_or_refused(read_manifest, path)


@fuzzed
@given(harm=damage(), packed=st.booleans())
def test_a_damaged_arpa_file_is_read_or_refused(tmp_path_factory, harm, packed):
    text = ARPA.encode()
    path = tmp_path_factory.getbasetemp() / ("fuzz.arpa.gz" if packed else "fuzz.arpa")
    path.write_bytes(harm(gzip.compress(text, mtime=0) if packed else text))
    read_or_refused(NGram.read, path, ["a", "b", "c"])
