import gzip
import itertools
import json
import re

import numpy as np
import pytest
from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet

from asrkit.data.batching.lengths import Lengths, shipped_lengths
from asrkit.data.batching.statistics import (
    histogram,
    length_stats,
    length_table,
    padding_of_random,
    read_lengths,
)
from asrkit.files import shipped

SECONDS, TEXTS = [1.5, 0.25, 4.0], ["hello", "né", "a longer one"]


@pytest.fixture
def manifests(tmp_path):
    """Files with SECONDS, one a kind of manifest; there is no audio."""
    sounds = [
        Recording(f"r{n}", [], 16_000, int(s * 16_000), s)
        for n, s in enumerate(SECONDS)
    ]
    said = [
        SupervisionSegment(one.id, one.id, 0, one.duration, text=text)
        for one, text in zip(sounds, TEXTS, strict=True)
    ]
    cuts = CutSet.from_manifests(
        RecordingSet.from_recordings(sounds), SupervisionSet.from_segments(said)
    )
    cuts.to_file(tmp_path / "mono.jsonl.gz")
    whole = list(cuts)
    CutSet.from_cuts(
        [whole[0].pad(duration=2.0), whole[0].append(whole[1]), whole[2]]
    ).to_file(tmp_path / "mixed.jsonl")
    (tmp_path / "folder").mkdir()
    RecordingSet.from_recordings(sounds).to_file(
        tmp_path / "folder" / "x_recordings_dev.jsonl.gz"
    )
    (tmp_path / "sounds").mkdir()
    RecordingSet.from_recordings(sounds).to_file(
        tmp_path / "sounds" / "recordings.jsonl.gz"
    )
    SupervisionSet.from_segments(said).to_file(
        tmp_path / "folder" / "x_supervisions_dev.jsonl.gz"
    )
    rows = [
        {"audio_filepath": "/none.wav", "duration": s, "text": text}
        for s, text in zip(SECONDS, TEXTS, strict=True)
    ]
    (tmp_path / "nemo.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["mono.jsonl.gz", "folder", "nemo.json", "folder/x_supervisions_dev.jsonl.gz"],
)
def test_any_manifest_gives_its_lengths_without_audio(manifests, name):
    lengths = read_lengths(manifests / name)
    assert lengths.seconds.tolist() == SECONDS and lengths.tokens.tolist() == [5, 2, 12]


def test_mixed_cuts_have_the_length_of_the_mix_and_the_texts_of_all(manifests):
    lengths = read_lengths(manifests / "mixed.jsonl")
    assert lengths.seconds.tolist() == [2.0, 1.75, 4.0] and lengths.tokens.tolist() == [
        5,
        len("hello né"),
        12,
    ]


@pytest.mark.parametrize("name", ["folder/x_recordings_dev.jsonl.gz", "sounds"])
def test_recordings_without_text_have_no_tokens(manifests, name):
    lengths = read_lengths(manifests / name)
    assert lengths.seconds.tolist() == SECONDS and not lengths.tokens.any()


def test_lines_that_name_a_sound_and_no_duration_are_measured(speak, tmp_path):
    speak(tmp_path / "a.wav", 0.5, 8_000)
    (tmp_path / "m.jsonl").write_text('{"audio": "a.wav", "text": "yes"}\n')
    lengths = read_lengths(tmp_path / "m.jsonl")
    assert (lengths.seconds.tolist(), lengths.tokens.tolist()) == ([0.5], [3])


def test_tokens_are_those_of_the_tokenizer(manifests, train_pieces):
    pieces = train_pieces(TEXTS * 20, vocab_size=20)
    assert read_lengths(manifests / "nemo.json", tokens=pieces).tokens.tolist() == [
        len(pieces.encode(text)) for text in TEXTS
    ]


@pytest.mark.parametrize(("content", "said"), [
    (b'{"duration": 1.0, "text": "a"}\n{"duration": 1.', "m.jsonl:2."),
    (b'{"duration": 1.0, "text": "a"}\n{"text": "a"}\n', "KeyError: 'audio' at "),
    (b'{"duration": 1.0, "text": "a"}\n[1]\n', "m.jsonl:2."),
    (gzip.compress(b'{"duration": 1.0, "text": "a"}\n' * 900)[:-20], "manifest: expected cuts, or lines with audio or duration"),
    (b"\xff\xfe\x00", "manifest: expected cuts, or lines with audio or duration"),
    (b"", "target: expected at least one utterance, got none"),
    (b'{"duration": 1.0, "text": "a"}\n{"duration": 1.0, "text": 5}\n', "expected str instance, int found at "),
    (b'{"duration": 1.0, "text": "a"}\n{"duration": null}\n', "m.jsonl:2."),
    (b'{"duration": 1.0, "text": "a"}\n{"duration": 1' + b"0" * 400 + b"}\n", "m.jsonl:2."),
    (b'{"duration": 1.0, "text": ' + b"[" * 100_000, "m.jsonl:1."),
    (b'{"duration": 0.0, "text": "a"}\n', "seconds: expected finite and above 0"),
])  # fmt: skip
def test_what_is_no_manifest_is_refused_in_one_line(tmp_path, content, said):
    file = tmp_path / ("m.jsonl.gz" if content[:2] == b"\x1f\x8b" else "m.jsonl")
    file.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_lengths(file)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_target_is_a_file_before_it_is_a_shipped_name_and_what_is_neither_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert len(read_lengths("ami_segments")) == 82_973
    (tmp_path / "ami_segments").write_text('{"duration": 2, "text": "a"}\n')
    assert read_lengths("ami_segments").seconds.tolist() == [2.0]
    with pytest.raises(
        ValueError,
        match=r"target: expected a manifest, a table .* or one of ami_segments, librispeech_eval",
    ):
        read_lengths("nothing")
    with pytest.raises(ValueError, match="lengths: expected CSV"):
        read_lengths("nothing.csv.gz")


def test_the_shipped_tables_are_what_their_readme_says():
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d,]+).*?\| ([\d.]+) \|.*?\| ([\d,]+)",
        (shipped("lengths") / "README.md").read_text(),
        re.M,
    )
    assert {name for name, *_ in rows} == {
        path.name.removesuffix(".csv.gz") for path in shipped("lengths").glob("*.gz")
    }
    for name, utterances, hours, tokens in rows:
        lengths = shipped_lengths(name)
        said = (
            int(utterances.replace(",", "")),
            float(hours),
            int(tokens.replace(",", "")),
        )
        assert (
            len(lengths),
            round(lengths.hours, 2),
            int(lengths.tokens.sum()),
        ) == said
    assert sum(path.stat().st_size for path in shipped("lengths").iterdir()) < 300_000


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_the_padding_of_random_batches_is_that_of_all_batches_there_are(batch):
    values = np.array([1.0, 4.0, 2.0, 2.0, 8.0, 0.5])
    longest = np.mean([max(some) for some in itertools.combinations(values, batch)])
    assert padding_of_random(values, batch) == pytest.approx(
        1 - values.mean() / longest
    )


def test_the_stats_are_those_of_the_lengths_and_json():
    lengths = Lengths([1.0, 2.0, 3.0], [10, 10, 60])
    stats = length_stats(lengths, batch=2)
    assert json.loads(json.dumps(stats)) == stats
    assert (
        stats["utterances"] == 3
        and stats["hours"] == round(6 / 3600, 4)
        and stats["tokens"] == 80
    )
    assert stats["quantiles"]["seconds"] == {
        "min": 1,
        "p1": 1.02,
        "p25": 1.5,
        "median": 2,
        "p75": 2.5,
        "p99": 2.98,
        "max": 3,
    }
    assert stats["quantiles"]["tokens_per_second"]["max"] == 20
    assert stats["random_batch_padding"] == {
        "seconds": 0.25,
        "tokens": pytest.approx(1 - (80 / 3) / (130 / 3), abs=1e-4),
    }
    table = length_table(stats)
    assert (
        "3 utterances, 0.00 hours, 80 tokens" in table
        and "25.0 % of their seconds and 38.5 % of their tokens" in table
    )


def test_without_tokens_nothing_is_said_of_them():
    stats = length_stats(Lengths([1.0, 2.0], [0, 0]))
    assert [*stats["quantiles"]] == ["seconds"] and [
        *stats["random_batch_padding"]
    ] == ["seconds"]
    assert stats["random_batch"] == 2 and "tokens not known" in length_table(stats)
    with pytest.raises(ValueError, match="batch: expected at least 1, got 0"):
        length_stats(Lengths([1.0], [0]), batch=0)


@pytest.mark.parametrize("seconds", [
    np.array([0.03]), np.array([3600.0, 7200.0]), np.r_[np.full(999, 2.5), 9000.0], np.arange(1, 33) / 2,
    np.random.default_rng(0).lognormal(1, 1, 5000), np.full(7, 4.0), np.array([8.5e9, 9e9]),
])  # fmt: skip
def test_the_histogram_counts_every_utterance_in_few_lines(seconds):
    lines = histogram(seconds).splitlines()
    counts = [int(line.split()[-1].replace(",", "")) for line in lines]
    assert sum(counts) == len(seconds)
    assert len(lines) == 16 and max(map(len, lines)) <= 95
    assert max(line.count("█") for line in lines) == 50
    assert all("█" in line for line, count in zip(lines, counts, strict=True) if count)
    width = np.quantile(seconds, 0.995) / 16
    wanted = np.bincount(np.minimum(seconds / width, 15).astype(int), minlength=16)
    assert counts == wanted.tolist()
