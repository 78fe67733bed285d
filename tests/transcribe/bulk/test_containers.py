import tarfile

import pytest

from asrkit.sound_files import Sound
from asrkit.transcribe.audio import read_audio
from asrkit.transcribe.bulk.containers import entries
from asrkit.transcribe.bulk.inputs import Recording


def held(path):
    """What a container holds: ids and sounds."""
    return [(one.id, one.sound) for one in entries(Recording("set", str(path)))]


def sound_of(recording):
    """The Sound of a recording that is no container."""
    (entry,) = entries(recording)
    return entry.sound


def test_a_recording_is_itself_whole_where_only_its_header_told_the_length(speech):
    path = speech[0]
    assert sound_of(Recording("a", str(path), 1.0, 2.0, 1)) == Sound(
        path, None, 1.0, 2.0, 1
    )
    assert sound_of(Recording("a", str(path), 0.0, 2.0, state=(1, 2))) == Sound(path)


@pytest.mark.parametrize("name", ["set.tar", "set.tar.gz"])
def test_the_sound_files_of_a_tar_come_in_its_order(tmp_path, speech, make_tar, name):
    members = {
        f"{n}/utt.{9 - n}.wav": path.read_bytes() for n, path in enumerate(speech)
    }
    found = held(make_tar(tmp_path / name, members))
    assert [label for label, _ in found] == [f"set/{member}" for member in members]
    assert [sound.data for _, sound in found] == [*members.values()]
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
        assert [sound.data for _, sound in whole] == [
            one.read_bytes() for one in speech[: len(whole)]
        ]
        assert (
            label == "set/"
            and last.error.startswith("audio: set.tar ")
            and "\n" not in last.error
        )
        assert bool(whole) == (size > 700)
    assert "has no recording to read" in last.error


def test_a_tar_without_sounds_or_with_a_name_twice_says_so(tmp_path, speech, make_tar):
    (only,) = held(make_tar(tmp_path / "set.tar", {"notes.txt": b"x"}))
    assert (
        only[1].error
        == "audio: set.tar has no recording to read (it holds no recording)."
    )
    with tarfile.open(tmp_path / "two.tar", "w") as tar:
        tar.add(speech[0], "x.wav")
        tar.add(speech[1], "x.wav")
    first, second = held(tmp_path / "two.tar")
    assert first[0] == "set/x.wav" and not first[1].error
    assert second == ("set/x.wav#1", second[1]) and second[1].error.endswith(
        "has 'x.wav' twice."
    )


def test_links_in_a_tar_are_errors_and_hidden_files_are_left_out(tmp_path, speech):
    first, again, link = (
        tmp_path / "x.wav",
        tmp_path / "hard.wav",
        tmp_path / "soft.wav",
    )
    first.write_bytes(speech[0].read_bytes())
    again.hardlink_to(first)
    link.symlink_to("x.wav")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for path in (first, again, link):
            tar.add(path, path.name)
        tar.add(speech[1], "._x.wav")  # what macOS writes beside x.wav
        kinds = [member.type for member in tar.getmembers()]
    assert kinds == [tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.REGTYPE]
    assert [(label, sound.error) for label, sound in held(tmp_path / "set.tar")] == [
        ("set/x.wav", ""),
        ("set/hard.wav", "audio: set.tar has no bytes for 'hard.wav'."),
        ("set/soft.wav", "audio: set.tar has no bytes for 'soft.wav'."),
    ]


def test_shar_that_lhotse_writes_is_read(tmp_path, speech):
    from lhotse import CutSet
    from lhotse import Recording as Lhotse
    from lhotse.shar import SharWriter

    cuts = CutSet.from_cuts(Lhotse.from_file(path).to_cut() for path in speech)
    with SharWriter(
        str(tmp_path), fields={"recording": "flac"}, shard_size=10
    ) as writer:
        for cut in cuts:
            writer.write(cut)
    (tar,) = tmp_path.glob("recording*.tar")
    found = held(tar)
    assert [label for label, _ in found] == [f"set/{cut.id}.flac" for cut in cuts]
    assert all(
        len(read_audio(sound, 16_000)) == len(read_audio(path, 16_000))
        for (_, sound), path in zip(found, speech, strict=True)
    )
