import gzip
import json

import pytest
import soundfile

from asrkit.transcribe.bulk import inputs
from asrkit.transcribe.bulk.inputs import Recording


def read(*given):
    """The recordings of inputs as a list."""
    return [*inputs.read(given)]


def cut(**changes):
    """A lhotse cut, as JSON."""
    recording = {
        "id": "r", "sources": [{"type": "file", "channels": [0], "source": "a.wav"}],
        "sampling_rate": 16_000, "num_samples": 160_000, "duration": 10.0,
    }  # fmt: skip
    row = {
        "id": "c",
        "start": 0,
        "duration": 10.0,
        "channel": 0,
        "type": "MonoCut",
        "recording": recording,
    }
    return row | changes


def test_a_folder_is_its_recordings_and_containers_with_lengths_of_headers(
    talks, make_tar, speech
):
    make_tar(talks / "b" / "set.tar", {"x.wav": speech[0].read_bytes()})
    (talks / "notes.txt").touch()
    rows = read(talks)
    names = [
        "a/0.wav",
        "a/1.wav",
        "a/2.wav",
        "a/3.wav",
        "a/empty.wav",
        "b/0.wav",
        "b/1.wav",
        "b/2.wav",
        "b/3.wav",
    ]
    assert [row.id for row in rows] == [
        *names,
        "b/set.tar",
        "b/text.wav",
        "b/torn.flac",
        "long.flac",
    ]
    assert [row.path for row in rows] == [str(talks / row.id) for row in rows]
    lengths = {row.id: row.duration_s for row in rows}
    assert lengths["a/0.wav"] == soundfile.info(str(speech[0])).duration
    assert (
        lengths["a/empty.wav"] is lengths["b/text.wav"] is lengths["b/set.tar"] is None
    )
    assert [row.id for row in rows if row.is_container] == ["b/set.tar"]
    assert rows[0].state[0] == speech[0].stat().st_size


def test_lines_name_a_file_or_a_part_of_it_relative_to_the_manifest_or_its_parent(
    tmp_path, make_manifest
):
    lines = [
        {"audio_filepath": "audio/a.wav", "duration": 3.5, "text": "x"},
        {"audio_filepath": "audio/a.wav", "offset": 1.5, "duration": 2},
        {"audio": "/elsewhere/b.wav", "id": 7, "duration": None, "offset": 0},
        {"audio_filepath": "audio/c.tar"},
    ]
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio" / "a.wav").touch()
    (tmp_path / "lists").mkdir()
    manifest = make_manifest(tmp_path / "lists" / "m.json", lines)
    a = str(tmp_path / "audio" / "a.wav")
    wanted = [
        Recording("audio/a.wav", a, 0.0, 3.5),
        Recording("audio/a.wav@1.5", a, 1.5, 2.0),
        Recording("7", "/elsewhere/b.wav"),
        Recording("audio/c.tar", str(tmp_path / "audio" / "c.tar")),
    ]
    assert read(manifest) == wanted and wanted[3].is_container
    packed = tmp_path / "lists" / "m.jsonl.gz"
    packed.write_bytes(
        gzip.compress(b"\xef\xbb\xbf\n" + manifest.read_bytes() + b"\n\n")
    )
    assert read(packed) == wanted
    assert read(packed.rename(tmp_path / "lists" / "M.JSONL.GZ")) == wanted


def test_lhotse_cuts_are_parts_of_their_recordings(tmp_path, make_manifest):
    both = cut()["recording"] | {
        "sources": [{"type": "file", "channels": [0, 1], "source": "b.wav"}]
    }
    lines = [
        cut(),
        cut(id="part", start=2.5, duration=4.25),
        cut(id="right", channel=1, recording=both),
        cut(id="all", channel=[0, 1], type="MultiCut", recording=both),
        cut(id="begin", duration=9.0),
        cut(
            id="unknown",
            duration=9.0,
            recording=cut()["recording"] | {"duration": None},
        ),
    ]
    rows = read(make_manifest(tmp_path / "cuts.jsonl", lines))
    parts = [(row.id, row.start_s, row.duration_s, row.channel) for row in rows]
    assert parts == [
        ("c", 0.0, 10.0, None), ("part", 2.5, 4.25, None), ("right", 0.0, 10.0, 1), ("all", 0.0, 10.0, None),
        ("begin", 0.0, 9.0, None), ("unknown", 0.0, 9.0, None),
    ]  # fmt: skip
    assert {row.path for row in rows} == {
        str(tmp_path / "a.wav"),
        str(tmp_path / "b.wav"),
    }


def test_cuts_that_lhotse_writes_are_read(tmp_path, speech):
    from lhotse import CutSet, Recording

    cuts = CutSet.from_cuts(Recording.from_file(path).to_cut() for path in speech)
    short = cuts.truncate(max_duration=0.5, offset_type="end", preserve_id=False)
    short.to_file(tmp_path / "cuts.jsonl.gz")
    assert [(row.id, row.path, row.start_s, row.duration_s) for row in read(tmp_path / "cuts.jsonl.gz")] == [
        (one.id, str(path), one.start, one.duration) for one, path in zip(short, speech, strict=True)
    ]  # fmt: skip


SPOILT = cut()["recording"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "got no JSON (Expecting property name"),
        ('{"audio": "a"} {"audio": "b"}', "got no JSON (Extra data, column 16)"),
        ("[]", "manifest: expected objects, got list."),
        ("{}", "got KeyError: 'audio'"),
        ('{"audio": ["a", "b"]}', "expected the path of a sound file, got ['a', 'b']"),
        ('{"audio": "a", "duration": -1}', "expected 0 to 1,000,000,000 seconds as duration, got -1."),
        ('{"audio": "a", "duration": NaN}', "expected 0 to 1,000,000,000 seconds as duration, got nan."),
        ('{"audio": "a", "offset": "1"}', "seconds as offset, got '1'."),
        (json.dumps(cut(channel="0")), "expected the number of a channel, from 0, got '0' of 'c'."),
        (json.dumps(cut(recording=SPOILT | {"duration": -5})), "seconds as duration of the recording, got -5."),
        (json.dumps(cut(type="MixedCut")), "expected cuts of one recording, got a MixedCut 'c'."),
        (json.dumps(cut(recording=SPOILT | {"sources": [{"type": "url", "source": "x"}]})), "audio in one file"),
        (json.dumps(cut(recording=SPOILT | {"transforms": [{"name": "Speed"}]})), "got transforms of 'c'."),
        ("\xff", "UnicodeDecodeError"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_one_line_that_names_the_line(tmp_path, line, said):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"audio": "fine.wav"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match="^manifest: ") as error:
        read(path)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert f"{path}:3" in str(error.value) or "Unicode" in said


def test_a_torn_gzip_is_one_line(tmp_path):
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"audio": "a.wav"}\n' * 9000)[:-30])
    with pytest.raises(
        ValueError, match="^manifest: expected .* got EOFError: .*m.jsonl.gz:"
    ):
        read(path)


def test_what_is_no_input_is_one_line(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "void").mkdir()
    for name, said in {
        "notes.txt": "got .*notes.txt",
        "void": "none in",
        "none.wav": "Check the path",
        "none.jsonl": "Check",
    }.items():
        with pytest.raises(ValueError, match=f"^files: expected .*{said}") as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)


def test_the_state_of_an_input_changes_when_a_recording_does(
    talks, make_manifest, tmp_path
):
    manifest = make_manifest(tmp_path / "m.jsonl", [{"audio": "a.wav"}])
    before = [inputs.state(talks), inputs.state(manifest)]
    assert [inputs.state(talks), inputs.state(manifest)] == before
    (talks / "b" / "text.wav").write_text("now longer")
    make_manifest(manifest, [{"audio": "a.wav"}, {"audio": "b.wav"}])
    assert inputs.state(talks) != before[0] and inputs.state(manifest) != before[1]


def test_a_sound_file_is_itself_with_the_length_of_its_header(speech, monkeypatch):
    monkeypatch.chdir(speech[0].parent)
    (one,) = read(speech[0].name)
    length_s = soundfile.info(str(speech[0])).duration
    status = speech[0].stat()
    state = (status.st_size, status.st_mtime_ns)
    assert one == Recording(speech[0].name, str(speech[0]), 0.0, length_s, state=state)
