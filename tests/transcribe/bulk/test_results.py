from pathlib import Path

import pytest

from asrkit.sound_files import Sound
from asrkit.transcribe import Transcript, Word
from asrkit.transcribe.bulk import Counts, results, rows
from asrkit.transcribe.bulk.containers import Entry


def made(timestamps=True):
    """Three rows: with words, without, and with an error."""
    entries = [Entry(f"id {n} \u2028é", "a.wav", 0.5 * n, Sound(Path("a.wav"))) for n in range(3)]
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


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("kind", results.FORMATS)
def test_what_is_written_is_read_again_with_its_counts(tmp_path, kind, timestamps):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    given = made(timestamps)
    if kind == "parquet":
        given[0]["text"] = "hé"  # Arrow takes no surrogate
    path = tmp_path / f"part-0.{kind}"
    counts = results.write(path, given)
    assert counts == results.counts_of(path) == Counts(3, 1, 3.235)
    assert results.total([path, path]) == Counts(6, 2, 6.47)
    assert [*results.read(path)] == [*rows(tmp_path)] == given
    before = path.read_bytes()
    results.write(path, given)
    assert path.read_bytes() == before


def test_rows_have_words_only_with_timestamps_and_no_time_of_the_run():
    plain, timed = made(False)[0], made()[0]
    assert [*plain] == ["id", "source", "start_s", "audio_s", "text", "error"]
    assert timed["words"] == [{"word": "hé", "start_s": 0.1, "end_s": 0.4, "confidence": 0.988}]


def test_parquet_keeps_a_text_that_is_no_unicode(tmp_path):
    pytest.importorskip("pyarrow")
    results.write(tmp_path / "part-0.parquet", made())
    assert next(results.read(tmp_path / "part-0.parquet"))["text"] == "hé\\ud800"


@pytest.mark.parametrize("kind", results.FORMATS)
def test_a_result_that_somebody_changed_is_one_line_that_names_it(tmp_path, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"part-0.{kind}"
    results.write(path, made())
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b'{"id": 1}\n', b"[]\n", b"\xff\n"):
        path.write_bytes(data)
        with pytest.raises(ValueError) as error:
            results.counts_of(path)
        wanted = f"out: expected a result of asrkit, got something else in {path}. Remove it: "
        assert str(error.value) == wanted + "the same command makes it again."
