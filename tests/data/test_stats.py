import gzip
import itertools
import json
import re

import numpy as np
import pytest
from lhotse import (
    AudioSource,
    CutSet,
    Recording,
    RecordingSet,
    SupervisionSegment,
    SupervisionSet,
)

from asrkit.data.batching.lengths import Lengths, shipped_lengths, shipped_names
from asrkit.data.stats import (
    histogram,
    length_stats,
    length_table,
    padding_of_random,
    read_lengths,
)
from asrkit.files import shipped

SECONDS = [1.5, 0.25, 4.0]
TEXTS = ["hello", "né", "a longer one"]


@pytest.fixture
def manifests(tmp_path):
    """A file for each kind of manifest, with SECONDS; there is no audio."""
    sounds = []
    parts = []
    rows = []
    for n, (s, text) in enumerate(zip(SECONDS, TEXTS, strict=True)):
        source = AudioSource("file", [0], "none.wav")
        sounds.append(Recording(f"r{n}", [source], 16_000, int(s * 16_000), s))
        parts.append(SupervisionSegment(f"r{n}", f"r{n}", 0, s, text=text))
        rows.append({"audio_filepath": "/none.wav", "duration": s, "text": text})
    recordings = RecordingSet.from_recordings(sounds)
    supervisions = SupervisionSet.from_segments(parts)
    cuts = CutSet.from_manifests(recordings, supervisions)
    first, second, third = cuts
    mixed = CutSet.from_cuts([first.pad(duration=2.0), first.append(second), third])
    (tmp_path / "folder").mkdir()
    cuts.to_file(tmp_path / "mono.jsonl.gz")
    mixed.to_file(tmp_path / "mixed.jsonl")
    recordings.to_file(tmp_path / "folder/x_recordings_dev.jsonl.gz")
    supervisions.to_file(tmp_path / "folder/x_supervisions_dev.jsonl.gz")
    (tmp_path / "nemo.json").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


NONE = [0, 0, 0]
SPOKEN = [5, 2, 12]


@pytest.mark.parametrize(
    "name, seconds, tokens",
    [
        ("mono.jsonl.gz", SECONDS, SPOKEN),
        ("folder", SECONDS, SPOKEN),
        ("nemo.json", SECONDS, SPOKEN),
        ("folder/x_supervisions_dev.jsonl.gz", SECONDS, SPOKEN),
        ("folder/x_recordings_dev.jsonl.gz", SECONDS, NONE),
        # the length of the mix, and the texts of all
        ("mixed.jsonl", [2.0, 1.75, 4.0], [5, len("hello né"), 12]),
    ],
)
def test_lengths_of_any_manifest_need_no_audio(manifests, name, seconds, tokens):
    lengths = read_lengths(manifests / name)
    assert lengths.seconds.tolist() == seconds
    assert lengths.tokens.tolist() == tokens


def test_tokens_are_those_of_the_tokenizer(manifests, train_pieces):
    pieces = train_pieces(TEXTS * 20, vocab_size=20)
    assert read_lengths(manifests / "nemo.json", tokens=pieces).tokens.tolist() == [
        len(pieces.encode(text)) for text in TEXTS
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"duration": 1.0, "text": "a"}\n{"duration": 1.', "m.jsonl:2."),
        (b'{"duration": 1.0, "text": "a"}\n{"text": "a"}\n', "KeyError: 'audio' at "),
        (
            gzip.compress(b'{"duration": 1.0, "text": "a"}\n' * 900)[:-20],
            "manifest: expected cuts, or lines with audio or duration",
        ),
        (b"", "target: expected at least one utterance, got none"),
        (
            b'{"duration": 1.0, "text": "a"}\n{"duration": 1.0, "text": 5}\n',
            "expected str instance, int found at ",
        ),
        (b'{"duration": 1.0, "text": ' + b"[" * 100_000, "m.jsonl:1."),
        (b'\n{"duration": 0.0, "text": "a"}\n', "above 0 s, got 0.0. See "),
        (b'{"duration": NaN, "text": "a"}\n', "above 0 s, got nan. See "),
    ],
)
def test_invalid_manifests_are_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / ("m.jsonl.gz" if content[:2] == b"\x1f\x8b" else "m.jsonl")
    file.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_lengths(file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_comes_before_a_shipped_name_and_other_targets_are_refused(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert len(read_lengths("ami_segments")) == 82_973
    (tmp_path / "ami_segments").write_text('{"duration": 2, "text": "a"}\n')
    assert read_lengths("ami_segments").seconds.tolist() == [2.0]
    message = (
        "target: expected a manifest, a table .* or one of ami_segments, librispeech"
    )
    with pytest.raises(ValueError, match=message):
        read_lengths("nothing")
    with pytest.raises(ValueError, match="lengths: expected CSV"):
        read_lengths("nothing.csv.gz")


def test_the_shipped_tables_match_their_readme():
    text = (shipped("lengths") / "README.md").read_text()
    row = r"^\| `(\w+)` \| (\d+).*?\| ([\d.]+) \|.*?\| (\d+)"
    rows = re.findall(row, text.replace(",", ""), re.MULTILINE)
    assert sorted(name for name, *_ in rows) == shipped_names()
    for name, utterances, hours, tokens in rows:
        lengths = shipped_lengths(name)
        actual = (len(lengths), round(lengths.hours, 2), int(lengths.tokens.sum()))
        assert actual == (int(utterances), float(hours), int(tokens))
    assert sum(path.stat().st_size for path in shipped("lengths").iterdir()) < 300_000


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_the_padding_of_random_batches_is_the_mean_over_all_possible_ones(batch):
    values = np.array([1.0, 4.0, 2.0, 2.0, 8.0, 0.5])
    longest = np.mean([max(some) for some in itertools.combinations(values, batch)])
    wanted = 1 - values.mean() / longest
    assert padding_of_random(values, batch) == pytest.approx(wanted)


def test_stats_describe_the_lengths_and_are_json():
    stats = length_stats(Lengths([1.0, 2.0, 3.0], [10, 10, 60]), batch=2)
    assert json.loads(json.dumps(stats)) == stats
    quantiles = stats["quantiles"]
    assert [*quantiles["seconds"].values()] == [1, 1.02, 1.5, 2, 2.5, 2.98, 3]
    assert quantiles["tokens_per_second"]["max"] == 20
    padding = {"seconds": 0.25, "tokens": 0.3846}  # 1 - (80 / 3) / (130 / 3)
    assert stats["random_batch_padding"] == padding
    message = "25.0 % of their seconds and 38.5 % of their tokens"
    assert message in length_table(stats)


def test_without_tokens_the_stats_omit_them():
    stats = length_stats(Lengths([1.0, 2.0], [0, 0]))
    assert [*stats["quantiles"]] == [*stats["random_batch_padding"]] == ["seconds"]
    assert stats["random_batch"] == 2
    assert "tokens not known" in length_table(stats)


@pytest.mark.parametrize(
    "seconds",
    [
        np.array([0.03]),
        np.r_[np.full(999, 2.5), 9000.0],
        np.arange(1, 33) / 2,
        np.array([8.5e9, 9e9]),
        np.random.default_rng(0).lognormal(1, 1, 5000),
    ],
)
def test_the_histogram_counts_every_utterance(seconds):
    lines = histogram(seconds).splitlines()
    counts = [int(line.split()[-1].replace(",", "")) for line in lines]
    assert all("█" in line for line, count in zip(lines, counts, strict=True) if count)
    width = np.quantile(seconds, 0.995) / 16
    wanted = np.bincount(np.minimum(seconds / width, 15).astype(int), minlength=16)
    assert counts == wanted.tolist()
    assert sum(counts) == len(seconds)
