import gzip
import json
import tarfile
from pathlib import Path

import pytest
import soundfile

from asrkit.sound_files import Sound
from asrkit.transcribe.audio import read_audio
from asrkit.transcribe.bulk import manifests
from asrkit.transcribe.bulk.manifests import Recording, is_container, members


def read(*given):
    """The recordings of inputs as a list."""
    return [*manifests.read(given)]


def held(path):
    """The ids and sounds in a container."""
    return [(one.id, one.sound) for one in members(Recording("set", Sound(path)))]


def cut(**changes):
    """A lhotse cut, as JSON."""
    recording = {
        "id": "r", "sources": [{"type": "file", "channels": [0], "source": "a.wav"}],
        "sampling_rate": 16_000, "num_samples": 160_000, "duration": 10.0,
    }  # fmt: skip
    row = {"id": "c", "start": 0, "duration": 10.0, "channel": 0, "type": "MonoCut", "recording": recording}  # fmt: skip
    return row | changes


BOTH = cut()["recording"] | {
    "sources": [{"type": "file", "channels": [0, 1], "source": "b.wav"}]
}


def cuts_of(paths):
    """A lhotse cut of each whole file."""
    from lhotse import CutSet
    from lhotse import Recording as Lhotse

    return CutSet.from_cuts(Lhotse.from_file(path).to_cut() for path in paths)


def test_a_folder_is_its_recordings_and_containers_with_lengths_of_headers(
    tmp_path, make_tar, speech
):
    for name in ("b/0.wav", "a.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(speech[0].read_bytes())
    for name in ("notes.txt", "empty.wav", ".hidden/set.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    tar = make_tar(tmp_path / "b" / "set.tar", {"x.wav": speech[0].read_bytes()})
    rows = read(tmp_path)
    ids = ["a.wav", "b/0.wav", "b/set.tar", "empty.wav"]
    assert [row.id for row in rows] == ids
    assert [row.sound for row in rows] == [Sound(tmp_path / name) for name in ids]
    header_s = soundfile.info(str(speech[0])).duration
    tar_s = tar.stat().st_size / manifests.BYTES_PER_S
    wanted = [header_s, header_s, tar_s, manifests.UNKNOWN_S]
    assert [row.planned_s for row in rows] == wanted
    assert [is_container(row.sound.path) for row in rows] == [False, False, True, False]


def test_a_sound_file_is_itself_also_by_a_relative_path(speech, monkeypatch):
    monkeypatch.chdir(speech[0].parent)
    (one,) = read(speech[0].relative_to(speech[0].parent))
    assert (one.id, one.sound) == (speech[0].name, Sound(speech[0]))


def test_lines_name_a_file_or_a_part_of_it_relative_to_the_manifest_or_its_parent(
    tmp_path, make_manifest
):
    a = tmp_path / "audio" / "a.wav"
    named = {  # a line, and what it names
        Recording("audio/a.wav", Sound(a, duration_s=3.5), 3.5): {"audio_filepath": "audio/a.wav", "duration": 3.5, "text": "x"},
        Recording("audio/a.wav@1.5", Sound(a, None, 1.5, 2.0), 2.0): {"audio_filepath": "audio/a.wav", "offset": 1.5, "duration": 2},
        Recording("7", Sound(Path("/elsewhere/b.wav"))): {"audio": "/elsewhere/b.wav", "id": 7, "duration": None, "offset": 0},
        Recording("audio/c.tar", Sound(a.with_name("c.tar"))): {"audio_filepath": "audio/c.tar"},
    }  # fmt: skip
    for folder in ("audio", "lists"):
        (tmp_path / folder).mkdir()
    a.touch()
    manifest = make_manifest(tmp_path / "lists" / "m.json", named.values())
    assert read(manifest) == [*named]
    packed = tmp_path / "lists" / "M.JSONL.GZ"
    lines = b"\xef\xbb\xbf\n" + manifest.read_bytes() + b"\n\n"
    packed.write_bytes(gzip.compress(lines))
    assert read(packed) == [*named]


def test_cuts_that_lhotse_writes_are_parts_of_their_recordings(
    tmp_path, speech, make_manifest
):
    cuts = cuts_of(speech)
    short = cuts.truncate(max_duration=0.5, offset_type="end", preserve_id=False)
    short.to_file(tmp_path / "cuts.jsonl.gz")
    assert read(tmp_path / "cuts.jsonl.gz") == [
        Recording(one.id, Sound(path, None, one.start, one.duration), one.duration)
        for one, path in zip(short, speech, strict=True)
    ]
    right = cut(channel=1, recording=BOTH)
    mean = cut(id="all", channel=[0, 1], type="MultiCut", recording=BOTH)
    rows = read(make_manifest(tmp_path / "cuts.jsonl", [cut(id="a"), right, mean]))
    assert [row.sound.channel for row in rows] == [None, 1, None]


PLAIN = "expected cuts of one recording in one file, as it was recorded, got a"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "got JSONDecodeError: Expecting property name"),
        ("[]", "expected one object a line, got a list"),
        ("{}", "got KeyError: 'audio'"),
        ('{"audio": "a", "duration": NaN}', "expected 0 to 1,000,000,000 seconds as duration, got nan."),
        (json.dumps(cut(type="MixedCut", recording=None)), f"{PLAIN} MixedCut 'c'."),
        (json.dumps(cut(recording=BOTH | {"transforms": [{"name": "Speed"}]})), f"{PLAIN} MonoCut 'c'."),
        ("\xff", "UnicodeDecodeError"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_one_line_that_names_the_line(tmp_path, line, message):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"audio": "fine.wav"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match="^manifest: ") as error:
        read(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert f"{path}:3" in str(error.value) or "Unicode" in message


@pytest.mark.parametrize("name, message", [
    ("notes.txt", "files: expected .* got .*notes.txt"),
    ("none.wav", "files: expected .* Check the path"),
    ("torn.jsonl.gz", "manifest: expected .* got EOFError: .*torn.jsonl.gz:"),
])  # fmt: skip
def test_a_wrong_input_is_one_line(tmp_path, name, message):
    (tmp_path / "notes.txt").touch()
    lines = gzip.compress(b'{"audio": "a.wav"}\n' * 90)
    (tmp_path / "torn.jsonl.gz").write_bytes(lines[:-10])
    with pytest.raises(ValueError, match=f"^{message}") as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["set.tar", "set.tar.gz"])
def test_the_sound_files_of_a_tar_come_in_its_order(tmp_path, speech, make_tar, name):
    files = {f"{n}/utt.{9 - n}.wav": path.read_bytes() for n, path in enumerate(speech)}
    found = held(make_tar(tmp_path / name, files))
    assert [label for label, _ in found] == [f"set/{member}" for member in files]
    assert [sound.data for _, sound in found] == [*files.values()]


def test_the_whole_members_of_a_torn_tar_are_kept_and_the_rest_is_one_error(
    tmp_path, speech, make_tar
):
    contents = [path.read_bytes() for path in speech]
    files = {f"{n}.wav": data for n, data in enumerate(contents)}
    path = make_tar(tmp_path / "set.tar", files)
    data = path.read_bytes()
    for size in (len(data) // 2, 700, 0):
        path.write_bytes(data[:size])
        *whole, (label, last) = held(path)
        n = len(whole)
        assert [sound.data for _, sound in whole] == contents[:n]
        assert bool(n) == (size > 700)
        assert label == "set/"
        assert last.error.startswith(f"audio: set.tar has {n} recordings to read (")
        assert "\n" not in last.error


def test_links_in_a_tar_have_no_bytes_and_hidden_files_are_left_out(tmp_path, speech):
    first = tmp_path / "x.wav"
    first.write_bytes(speech[0].read_bytes())
    (tmp_path / "hard.wav").hardlink_to(first)
    (tmp_path / "soft.wav").symlink_to("x.wav")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for name in ("x.wav", "hard.wav", "soft.wav"):
            tar.add(tmp_path / name, name)
        tar.add(first, "._x.wav")  # which macOS adds to x.wav
    found = {label: sound.data for label, sound in held(tmp_path / "set.tar")}
    links = {"set/hard.wav": b"", "set/soft.wav": b""}
    assert found == {"set/x.wav": first.read_bytes()} | links
    with pytest.raises(ValueError, match=r"^audio: .* 0 bytes in hard.wav"):
        read_audio(Sound(Path("hard.wav"), b""), 16_000)


def test_a_tar_without_a_recording_is_an_error(tmp_path, make_tar):
    ((_, none),) = held(make_tar(tmp_path / "none.tar", {"a.txt": b""}))
    wanted = "(tar: expected sound files, got none.)."
    assert none.error == f"audio: none.tar has 0 recordings to read {wanted}"


def test_shar_that_lhotse_writes_is_read(tmp_path, speech):
    from lhotse.shar import SharWriter

    cuts = cuts_of(speech)
    fields = {"recording": "flac"}
    with SharWriter(str(tmp_path), fields=fields, shard_size=10) as writer:
        for one in cuts:
            writer.write(one)
    (tar,) = tmp_path.glob("recording*.tar")
    found = held(tar)
    assert [label for label, _ in found] == [f"set/{one.id}.flac" for one in cuts]
    sizes = [len(read_audio(sound, 16_000)) for _, sound in found]
    assert sizes == [len(read_audio(path, 16_000)) for path in speech]
