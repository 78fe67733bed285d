"""Sound files of people: which a folder holds, how one is opened, and whether it is whole."""

import contextlib
import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit.shapes import expect

SUFFIXES = frozenset(
    ".wav .flac .ogg .oga .opus .mp3 .aif .aiff .aifc .au .snd .caf .w64 .rf64 .sph .nist".split()
)
UNREAD = frozenset(".m4a .mp4 .aac .wma .webm .mkv .mka .amr".split())  # libsndfile reads none
CONVERT = "Convert it first: ffmpeg -i IN OUT.wav."
# Bytes of samples in a WAV, AIFF or AU file by its header, and those that are there.
PROMISED = re.compile(r"(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)")
UNKNOWN_SIZE = 0x7FFF0000


@dataclass(frozen=True)
class Sound:
    """A recording that can be opened: a sound file or the bytes of one, whole or a part of it.

    Args:
        path: The file. With `data`, only what the recording is called in results and errors.
        data: The bytes of a sound file; None: those of the file `path`.
        start_s: Where the part begins, in seconds.
        duration_s: Its length in seconds; None: to the end of the recording.
        channel: Which channel, from 0; None: the mean of all.
        error: Why the recording cannot be opened, in one line; "": it can be tried.
    """

    path: Path
    data: bytes | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    channel: int | None = None
    error: str = ""


def listed(folder: Path) -> list[Path]:
    """What a folder holds at any depth that is a recording, sorted, as paths below `folder`.

    These are files with a suffix of SUFFIXES; files with one of UNREAD, unless a file that can be
    read lies beside it under the same name; links of such names to nothing; and subfolders that
    cannot be read. Opening one of the last three kinds fails with a reason. Hidden files and
    folders are left out.

    Args:
        folder: The folder. A file, or nothing, holds no recordings.
    """
    closed: list[OSError] = []
    sounds = []
    others = []
    for place, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if name.startswith(".") or not (path.is_file() or path.is_symlink()):
                continue
            if path.suffix.lower() in SUFFIXES:
                sounds.append(path)
            elif path.suffix.lower() in UNREAD:
                others.append(path)
    readable = {path.with_suffix("") for path in sounds}
    found = sounds + [path for path in others if path.with_suffix("") not in readable]
    found += [Path(error.filename) for error in closed]
    return sorted(path.relative_to(folder) for path in found if path != folder)


def find(paths: str | Path | Iterable[str | Path]) -> list[tuple[Path, Path]]:
    """(file, its name among the results) for each path, in order.

    A folder stands for the recordings under it, as `listed` returns them. Some of them cannot be
    read, and fail in their turn. A file is taken whatever its suffix. A folder without recordings
    stands for itself: reading it fails.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    found: list[tuple[Path, Path]] = []
    for path in map(Path, paths):
        names = [(path / name, name) for name in listed(path)]
        found += names or [(path, Path(path.name))]
    return found


def stored(sound: Sound) -> str | bytes | io.BytesIO:
    """Where soundfile finds the bytes of a recording: the name of its file, or a stream.

    Args:
        sound: The recording.
    """
    if sound.data is not None:
        return io.BytesIO(sound.data)
    if os.name == "posix":
        return os.fsencode(sound.path)  # soundfile cannot encode text that is no UTF-8
    return str(sound.path)


def seconds(sound: Sound) -> float:
    """Length by the header, 0 where there is none. For progress only: headers may be wrong."""
    import soundfile

    if sound.duration_s is not None:
        return sound.duration_s
    try:
        whole_s = soundfile.info(stored(sound)).duration
    except (soundfile.LibsndfileError, TypeError, ZeroDivisionError):
        return 0.0
    return max(0.0, whole_s - sound.start_s)


def open_sound(sound: Sound) -> Any:
    """The opened soundfile.SoundFile, at its first sample also for a part of it.

    Args:
        sound: The recording.

    Raises:
        ValueError: In one line, for what is no sound file, or by its header only the beginning of
            one; see `expect_whole` for FLAC and MP3.
    """
    import soundfile

    path = sound.path
    if sound.error:
        raise ValueError(sound.error)
    if sound.data is None:
        _expect_file(path)
    else:
        expect(len(sound.data) > 0, "audio", "a sound file", f"0 bytes in {path.name}")
    try:
        file = soundfile.SoundFile(stored(sound))
    except (soundfile.LibsndfileError, TypeError) as error:
        # TypeError: a suffix that promises samples without a header
        reason = getattr(error, "error_string", error)  # without the path
        remedy = ""
        if path.suffix.lower() in UNREAD:
            remedy = f" {CONVERT}"
        message = f"audio: {path.name} cannot be read (libsndfile: {reason}).{remedy}"
        raise ValueError(message) from None
    rate = file.samplerate
    usable = 100 <= rate <= 1_000_000
    expect(usable, "audio", "100 to 1,000,000 Hz", f"{rate} Hz in {path.name}")
    # libsndfile shortens the number of frames to what is there, and only its log tells. A stream
    # whose writer did not know its length has a size near 2^31 or 2^32 in its header, and is whole.
    sizes = PROMISED.search(file.extra_info)
    is_cut = sizes is not None and int(sizes[2]) < int(sizes[1]) < UNKNOWN_SIZE
    _expect_no_part(path, not is_cut and "lacks an end-of-stream bit" not in file.extra_info)
    return file


def expect_whole(path: Path) -> None:
    """ValueError, in one line, for what is no sound file, or only the beginning of one.

    The last sample is decoded, since the header of a FLAC or MP3 file that is cut short promises
    all of them. An MP3 file without a header of its own (Xing, Info) promises nothing.

    Args:
        path: The file.
    """
    import soundfile

    found = 0
    with open_sound(Sound(path)) as file:
        if file.frames == 0:
            return
        with contextlib.suppress(soundfile.LibsndfileError):  # raised where FLAC breaks off
            file.seek(file.frames - 1)
            found = len(file.read(1))
    _expect_no_part(path, found == 1)


def _expect_no_part(path: Path, whole: bool) -> None:
    expect(whole, "audio", "a whole file", f"a part of {path.name}", "The file is truncated.")


def _expect_file(path: Path) -> None:
    """ValueError unless `path` is a file that has bytes and may be read."""
    name = repr(str(path))
    try:
        if path.is_dir():
            os.scandir(path).close()
        elif path.is_file():
            path.open("rb").close()
    except OSError as error:
        why = f"{name}, which cannot be read ({error.strerror})"
        expect(False, "audio", "a file or folder with permission to read it", why)
    wanted = "a sound file, or a folder with some"
    expect(not path.is_dir(), "audio", wanted, name, "There is none in it.")
    expect(path.exists(), "audio", "a sound file", f"none at {name}", "Check the path.")
    expect(path.is_file(), "audio", "a sound file", name)
    expect(path.stat().st_size > 0, "audio", "a sound file", f"0 bytes in {path.name}")
