from pathlib import Path

import pytest

from asrkit.sound_files import Sound
from asrkit.transcribe import Transcript, Word
from asrkit.transcribe.bulk import Counts, results, rows
from asrkit.transcribe.bulk.containers import Entry


def made(timestamps=True):
    """Three rows: with words, without, and with an error."""
    entries = [
        Entry(f"id {n} \u2028é", "a.wav", 0.5 * n, Sound(Path("a.wav")))
        for n in range(3)
    ]
    word = Word("hé", 0.1, 0.4, 0.987654)
    transcripts = [
        Transcript(path=Path("a.wav"), text="hé\ud800", audio_s=1.23456, words=(word,)),
        Transcript(path=Path("a.wav"), audio_s=2.0),
        Transcript(path=Path("a.wav"), error="audio: gone."),
    ]
    return [
        results.row(entry, transcript, timestamps=timestamps)
        for entry, transcript in zip(entries, transcripts, strict=True)
    ]


def test_what_is_written_is_read_again_with_its_counts(tmp_path):
    given = made()
    path = tmp_path / "part-0.jsonl"
    results.write(path, given)
    assert results.count([path]) == Counts(3, 1, 3.235)
    assert results.count([path, path]) == Counts(6, 2, 6.47)
    assert [*rows(tmp_path)] == given


def test_rows_have_words_only_with_timestamps_and_no_time_of_the_run():
    plain, timed = made(False)[0], made()[0]
    assert [*plain] == ["id", "source", "start_s", "audio_s", "text", "error"]
    assert timed["words"] == [
        {"word": "hé", "start_s": 0.1, "end_s": 0.4, "confidence": 0.988}
    ]


@pytest.mark.parametrize(
    "data", [b'{"id": "a", "au', b'{"id": 1}\n', b"[]\n", b"\xff\n"]
)
def test_a_result_that_somebody_changed_is_one_line_that_names_it(tmp_path, data):
    path = tmp_path / "part-0.jsonl"
    path.write_bytes(data)
    wanted = (
        f"out: expected a result of asrkit, got something else in {path}. Remove it: "
    )
    with pytest.raises(ValueError) as error:
        results.count([path])
    assert str(error.value) == wanted + "the same command makes it again."
