import gzip
import json
import tarfile

import pytest
import soundfile

from asrkit.sound_files import Sound
from asrkit.transcribe import manifests
from asrkit.transcribe.audio import read_audio
from asrkit.transcribe.manifests import Recording, changes, members


def read(*given):
    """The recordings of inputs as a list."""
    return [*manifests.read(given)]


def held(path):
    """What a container holds: ids and sounds."""
    return [(one.id, one.sound) for one in members(Recording("set", Sound(path)))]


def cut(**changes):
    """A lhotse cut, as JSON."""
    recording = {
        "id": "r", "sources": [{"type": "file", "channels": [0], "source": "a.wav"}],
        "sampling_rate": 16_000, "num_samples": 160_000, "duration": 10.0,
    }  # fmt: skip
    row = {"id": "c", "start": 0, "duration": 10.0, "channel": 0, "type": "MonoCut", "recording": recording}  # fmt: skip
    return row | changes


def test_a_folder_is_its_recordings_and_containers_with_lengths_of_headers(
    talks, make_tar, speech
):
    tar = make_tar(talks / "b" / "set.tar", {"x.wav": speech[0].read_bytes()})
    (talks / "notes.txt").touch()
    (talks / ".hidden").mkdir()
    (talks / ".hidden" / "set.tar").touch()
    rows = read(talks)
    a = ["a/0.wav", "a/1.wav", "a/2.wav", "a/3.wav", "a/empty.wav"]
    b = ["b/0.wav", "b/1.wav", "b/2.wav", "b/3.wav", "b/set.tar", "b/text.wav", "b/torn.flac"]  # fmt: skip
    assert [row.id for row in rows] == [*a, *b, "long.flac"]
    assert [row.sound for row in rows] == [Sound(talks / row.id) for row in rows]
    lengths = {row.id: row.planned_s for row in rows}
    assert lengths["a/0.wav"] == soundfile.info(str(speech[0])).duration
    assert lengths["a/empty.wav"] == lengths["b/text.wav"] == manifests.UNKNOWN_S
    assert lengths["b/set.tar"] == tar.stat().st_size / manifests.BYTES_PER_S
    assert [row.id for row in rows if row.is_container] == ["b/set.tar"]


def test_a_sound_file_is_itself_also_by_a_relative_path(speech, monkeypatch):
    monkeypatch.chdir(speech[0].parent)
    (one,) = read(speech[0].relative_to(speech[0].parent))
    assert (one.id, one.sound) == (speech[0].name, Sound(speech[0]))


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
    a = tmp_path / "audio" / "a.wav"
    wanted = [
        Recording("audio/a.wav", Sound(a, duration_s=3.5), 3.5),
        Recording("audio/a.wav@1.5", Sound(a, start_s=1.5, duration_s=2.0), 2.0),
        Recording("7", Sound(a.parents[2] / "/elsewhere/b.wav")),
        Recording("audio/c.tar", Sound(a.with_name("c.tar"))),
    ]
    assert read(manifest) == wanted and wanted[3].is_container
    packed = tmp_path / "lists" / "M.JSONL.GZ"
    packed.write_bytes(
        gzip.compress(b"\xef\xbb\xbf\n" + manifest.read_bytes() + b"\n\n")
    )
    assert read(packed) == wanted


def test_cuts_that_lhotse_writes_are_parts_of_their_recordings(
    tmp_path, speech, make_manifest
):
    from lhotse import CutSet
    from lhotse import Recording as Lhotse

    cuts = CutSet.from_cuts(Lhotse.from_file(path).to_cut() for path in speech)
    short = cuts.truncate(max_duration=0.5, offset_type="end", preserve_id=False)
    short.to_file(tmp_path / "cuts.jsonl.gz")
    assert read(tmp_path / "cuts.jsonl.gz") == [
        Recording(one.id, Sound(path, None, one.start, one.duration), one.duration)
        for one, path in zip(short, speech, strict=True)
    ]
    both = cut()["recording"] | {
        "sources": [{"type": "file", "channels": [0, 1], "source": "b.wav"}]
    }
    right = cut(channel=1, recording=both)
    mean = cut(id="all", channel=[0, 1], type="MultiCut", recording=both)
    rows = read(make_manifest(tmp_path / "cuts.jsonl", [cut(id="a"), right, mean]))
    assert [row.sound.channel for row in rows] == [None, 1, None]


BOTH = cut()["recording"] | {
    "sources": [{"type": "file", "channels": [0, 1], "source": "x"}]
}
PLAIN = "expected cuts of one recording in one file, as it was recorded, got a"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "got JSONDecodeError: Expecting property name"),
        ("[]", "got TypeError: list indices"),
        ("{}", "got KeyError: 'audio'"),
        ('{"audio": ["a", "b"]}', "got TypeError: expected str"),
        ('{"audio": "a", "duration": -1}', "expected 0 to 1,000,000,000 seconds as duration, got -1.0."),
        ('{"audio": "a", "duration": NaN}', "expected 0 to 1,000,000,000 seconds as duration, got nan."),
        (json.dumps(cut(channel="x", recording=BOTH)), "got ValueError: invalid literal"),
        (json.dumps(cut(type="MixedCut", recording=None)), f"{PLAIN} MixedCut 'c'."),
        (json.dumps(cut(recording=BOTH | {"sources": [{"type": "url", "source": "x"}]})), f"{PLAIN} MonoCut 'c'."),
        (json.dumps(cut(recording=BOTH | {"transforms": [{"name": "Speed"}]})), f"{PLAIN} MonoCut 'c'."),
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


def test_what_is_no_input_is_one_line(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "torn.jsonl.gz").write_bytes(
        gzip.compress(b'{"audio": "a.wav"}\n' * 9000)[:-30]
    )
    for name, said in {
        "notes.txt": "files: expected .* got .*notes.txt",
        "none.wav": "files: expected .* Check the path",
        "none.jsonl": "files: expected .* Check the path",
        "torn.jsonl.gz": "manifest: expected .* got EOFError: .*torn.jsonl.gz:",
    }.items():
        with pytest.raises(ValueError, match=f"^{said}") as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)


def test_the_hash_of_an_input_changes_when_a_file_in_it_does(talks):
    before = changes(talks)
    assert changes(talks) == before != changes(talks / "b")
    (talks / "b" / "text.wav").write_text("now longer")
    assert changes(talks) != before


@pytest.mark.parametrize("name", ["set.tar", "set.tar.gz"])
def test_the_sound_files_of_a_tar_come_in_its_order(tmp_path, speech, make_tar, name):
    files = {f"{n}/utt.{9 - n}.wav": path.read_bytes() for n, path in enumerate(speech)}
    found = held(make_tar(tmp_path / name, files))
    assert [label for label, _ in found] == [f"set/{member}" for member in files]
    assert [sound.data for _, sound in found] == [*files.values()]
    assert len(read_audio(found[0][1], 16_000)) == len(read_audio(speech[0], 16_000))


def test_of_a_torn_tar_what_is_whole_is_kept_and_one_error_stands_for_the_rest(
    tmp_path, speech, make_tar
):
    path = make_tar(
        tmp_path / "set.tar",
        {f"{n}.wav": one.read_bytes() for n, one in enumerate(speech)},
    )
    data = path.read_bytes()
    for size in (len(data) // 2, 700, 0):
        path.write_bytes(data[:size])
        *whole, (label, last) = held(path)
        sounds = [sound.data for _, sound in whole]
        assert sounds == [one.read_bytes() for one in speech[: len(whole)]]
        assert bool(whole) == (size > 700) and label == "set/"
        said = f"audio: set.tar has {len(whole)} recordings to read ("
        assert last.error.startswith(said) and "\n" not in last.error


def test_links_in_a_tar_have_no_bytes_and_hidden_files_are_left_out(tmp_path, speech):
    first, again, link = (tmp_path / f"{name}.wav" for name in ("x", "hard", "soft"))
    first.write_bytes(speech[0].read_bytes())
    again.hardlink_to(first)
    link.symlink_to("x.wav")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for path in (first, again, link):
            tar.add(path, path.name)
        tar.add(speech[1], "._x.wav")  # what macOS writes beside x.wav
    found = dict(held(tmp_path / "set.tar"))
    empty = [label for label, sound in found.items() if not sound.data]
    assert empty == ["set/hard.wav", "set/soft.wav"]
    assert found["set/x.wav"].data == speech[0].read_bytes() and len(found) == 3
    with pytest.raises(ValueError, match=r"^audio: .* 0 bytes in hard.wav"):
        read_audio(found["set/hard.wav"], 16_000)
    tarfile.open(tmp_path / "none.tar", "w").close()
    ((_, none),) = held(tmp_path / "none.tar")
    wanted = "(tar: expected sound files, got none.)."
    assert none.error == f"audio: none.tar has 0 recordings to read {wanted}"


def test_shar_that_lhotse_writes_is_read(tmp_path, speech):
    from lhotse import CutSet
    from lhotse import Recording as Lhotse
    from lhotse.shar import SharWriter

    cuts = CutSet.from_cuts(Lhotse.from_file(path).to_cut() for path in speech)
    fields = {"recording": "flac"}
    with SharWriter(str(tmp_path), fields=fields, shard_size=10) as writer:
        for one in cuts:
            writer.write(one)
    (tar,) = tmp_path.glob("recording*.tar")
    found = held(tar)
    assert [label for label, _ in found] == [f"set/{one.id}.flac" for one in cuts]
    sizes = [len(read_audio(sound, 16_000)) for _, sound in found]
    assert sizes == [len(read_audio(path, 16_000)) for path in speech]
