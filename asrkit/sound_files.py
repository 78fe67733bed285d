"""Sound files of people: which a folder holds, how one is opened, and whether it is whole."""

import io
import math
import os
import re
import struct
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from asrkit.shapes import expect

UNREAD = frozenset(  # libsndfile, with which lhotse reads, decodes none of these
    ".m4a .m4b .mp4 .m4v .mov .3gp .3g2 .aac .ac3 .wma .asf .webm .mkv .mka .amr .avi .mp2".split()
)
SUFFIXES = UNREAD | frozenset(
    ".wav .wave .bwf .rf64 .w64 .flac .ogg .oga .opus .mp3 .aif .aiff .aifc .au .snd .caf .sph "
    ".nist".split()
)
CONVERT = "Convert it first: ffmpeg -i IN OUT.wav."
# Bytes of samples in a WAV, AIFF or AU file by its header, and those that are there.
PROMISED = re.compile(r"(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)")
UNKNOWN_SIZE = 0x7FFF0000
UNKNOWN_FRAMES = 2**62
PIECE = 4096  # samples that are read at a time: where a file breaks off, these are lost
LEAST_MISSING_S = 0.2  # headers are wrong by less, and encoders add and count some silence
# How files begin that libsndfile reads whole; of MP3 and Ogg it may read a part.
EXACT = (b"RIFF", b"RIFX", b"RF64", b"riff", b"FORM", b".snd", b"dns.", b"caff", b"fLaC", b"NIST")
# A file names others in some formats (HLS, concat); these hold their samples themselves.
DEMUXERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,eac3,flac,flv,loas,matroska,mov,mp3,mpc,mpc8,mpeg,mpegts,"
    "ogg,rm,tta,voc,w64,wav,wv"
)
STDIN = Path("-")
MPEG1_HZ = 32_000  # the lowest rate of MP3 files whose frames have 1152 samples
OPTIONS = {"format_whitelist": DEMUXERS, "ignore_length": "1"}  # of a WAV file: to its end
LEAST_CHUNK = 4096  # bytes behind the samples of a WAV file, to be more than a remainder
OGG_PAGE = 65_307  # most bytes of a page


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

    These are files with a suffix of SUFFIXES, links of such names to nothing, and subfolders that
    cannot be read. Opening one of the last two kinds fails with a reason. Links to folders are
    followed, each folder once. Hidden files and folders are left out.

    Args:
        folder: The folder. A file, or nothing, holds no recordings.
    """
    files, closed = _walk(folder)
    found = [path for path in files if path.suffix.lower() in SUFFIXES] + closed
    return sorted(path.relative_to(folder) for path in found if path != folder)


def left_out(paths: Iterable[str | Path]) -> Counter[str]:
    """How many files of each suffix `listed` leaves out of these folders."""
    suffixes = (path.suffix.lower() for folder in paths for path in _walk(Path(folder))[0])
    return Counter(suffix for suffix in suffixes if suffix not in SUFFIXES)


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files below a folder that are not hidden, and folders that cannot be read."""
    closed: list[OSError] = []
    files = []
    seen = set[str]()
    for place, folders, names in os.walk(folder, onerror=closed.append, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(place, name) for name in names if not name.startswith("."))
        files += [path for path in paths if path.is_file() or path.is_symlink()]
    return files, [Path(error.filename) for error in closed]


def find(paths: str | Path | Iterable[str | Path]) -> list[tuple[Path, Path]]:
    """(file, its name among the results) for each path, in order.

    A folder stands for the recordings under it, as `listed` returns them. Some of them cannot be
    read, and fail in their turn. A file is taken whatever its suffix. A folder without recordings
    stands for itself: reading it fails. "-" is standard input.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    found: list[tuple[Path, Path]] = []
    for path in map(Path, paths):
        names = [(path / name, name) for name in listed(path)]
        found += names or [(path, Path("stdin" if path == STDIN else path.name))]
    return found


def sound_of(path: Path) -> Sound:
    """The recording of a path; standard input and pipes are read now, to their end."""
    if path == STDIN:
        wanted = "a recording on standard input"
        expect(not sys.stdin.isatty(), "audio", wanted, "a terminal", "Try - < talk.wav.")
        return Sound(path, sys.stdin.buffer.read())
    if path.is_fifo():
        return Sound(path, path.read_bytes())
    return Sound(path)


def bytes_of(sound: Sound) -> IO[bytes]:
    """The opened file of a recording."""
    return sound.path.open("rb") if sound.data is None else io.BytesIO(sound.data)


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
    if sound.duration_s is not None:
        return sound.duration_s
    try:
        with open_sound(sound) as file:
            whole_s = file.about_s
    except (ValueError, OSError):
        return 0.0
    return max(0.0, whole_s - sound.start_s)


class BrokenOff(ValueError):
    """A recording that cannot be read to its end."""


class SoundReader(ABC):
    """An opened recording, at its first sample; a context manager.

    Attributes:
        rate_hz: Samples a second.
        channels: Number of channels.
        frames: Samples of a channel, if the file states them exactly; else infinity.
        about_s: Length by the header; 0: it says none.
        missing_s: What the header states beyond what is there, where that is seen at once.
    """

    rate_hz: int
    channels: int
    frames: float = math.inf
    about_s: float
    missing_s = 0.0

    def __init__(self) -> None:
        self.held: list[np.ndarray] = []
        self.following = self.pieces()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    @abstractmethod
    def pieces(self) -> Iterator[np.ndarray]:
        """Yield what is left as short arrays (n, channels) float32.

        Raises:
            BrokenOff: Why no more can be read, though there should be some.
        """

    def skip(self, frames: int) -> None:
        """Leave out so many frames."""
        while frames > 0 and len(left_out := self.read(min(frames, PIECE))):
            frames -= len(left_out)

    def read(self, frames: int) -> np.ndarray:
        """At most so many more frames (n, channels) float32; none at the end.

        Raises:
            BrokenOff: As `pieces`, once all before that has been read.
        """
        parts, self.held = self.held, []
        size = sum(map(len, parts))
        try:
            while size < frames and (piece := next(self.following, None)) is not None:
                parts.append(piece)
                size += len(piece)
        except BrokenOff as error:
            if not size:
                raise
            self.following = _raising(error)
        if not parts:
            return np.zeros((0, self.channels), np.float32)
        joined = np.concatenate(parts)
        if size > frames:
            self.held = [joined[frames:]]
        return joined[:frames]


def _raising(error: Exception) -> Iterator[np.ndarray]:
    raise error
    yield


class ExactFile(SoundReader):
    """A file that libsndfile reads, whose header states its length.

    libsndfile shortens that to what is there, and only its log tells. A stream whose writer did not
    know its length has a size near 2^31 or 2^32 in its header, and is whole.
    """

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file = file
        self.rate_hz = file.samplerate
        self.channels = file.channels
        self.frames = file.frames
        sizes = PROMISED.search(file.extra_info)
        if sizes and int(sizes[2]) < int(sizes[1]) < UNKNOWN_SIZE:
            self.frames = file.frames * int(sizes[1]) / int(sizes[2])
        self.about_s = file.frames / file.samplerate
        self.missing_s = self.frames / file.samplerate - self.about_s

    def close(self) -> None:
        self.file.close()

    def skip(self, frames: int) -> None:
        import soundfile

        try:
            self.file.seek(frames)
        except soundfile.LibsndfileError as error:
            raise BrokenOff(f"libsndfile: {error.error_string}") from None

    def pieces(self) -> Iterator[np.ndarray]:
        import soundfile

        try:
            while len(piece := self.file.read(PIECE, dtype="float32", always_2d=True)):
                yield piece
        except soundfile.LibsndfileError as error:
            raise BrokenOff(f"libsndfile: {error.error_string}") from None


class Held(io.BytesIO):
    """Bytes that FFmpeg's libraries read: a wrong place is an answer for them, no exception."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place, or say -1."""
        try:
            return super().seek(offset, whence)
        except ValueError:
            return -1


class Stream(SoundReader):
    """Any other recording, decoded by FFmpeg's libraries until it ends.

    What cannot be decoded is left out; if that is more than headers and tags between two recordings
    that were joined, or if the last page of an Ogg file is torn, the end raises.
    """

    def __init__(self, sound: Sound) -> None:
        import av

        super().__init__()
        with bytes_of(sound) as source:
            mpeg_frames, torn = _mp3_frames(source), _ends_in_page(source)
        stored: Any = str(sound.path.absolute()) if sound.data is None else Held(sound.data)
        try:
            self.container = av.open(stored, options=OPTIONS)
            self.track = self.container.streams.best("audio")
            if self.track is None or not self.track.codec_context:
                raise ValueError("there is no sound in it, or none of a known codec")
        except (av.error.FFmpegError, ValueError) as error:
            raise ValueError(getattr(error, "strerror", None) or str(error)) from None
        self.rate_hz = self.track.codec_context.sample_rate
        self.channels = self.track.codec_context.channels
        self.kind = self.container.format.name
        self.about_s = (self.container.duration or 0) / av.time_base
        if self.kind == "mp3":
            self.frames = mpeg_frames * (1152 if self.rate_hz >= MPEG1_HZ else 576)
        elif self.kind == "ogg" and torn:
            self.missing_s = math.inf
        elif self.kind.startswith("mov") and self.track.duration:
            self.frames = float(self.track.duration * self.track.time_base) * self.rate_hz
        elif self.kind.startswith("matroska") and len(self.container.streams) == 1:
            late_s = float((self.track.start_time or 0) * (self.track.time_base or 0))
            self.frames = (self.about_s - late_s if self.about_s else math.inf) * self.rate_hz

    def close(self) -> None:
        self.container.close()

    def pieces(self) -> Iterator[np.ndarray]:
        import av

        lost_s = 0.0
        wanted = ("fltp", self.track.codec_context.layout.name, self.rate_hz)
        made_for: Any = None
        resampler: Any = None
        try:
            for packet in self.container.demux(self.track):
                try:
                    frames = packet.decode()
                except av.error.InvalidDataError:
                    lost_s += float((packet.duration or 0) * (packet.time_base or 0))
                    continue
                for frame in frames:
                    form = (frame.format.name, frame.layout.name, frame.sample_rate)
                    if form == wanted:  # a resampler takes longer than to decode
                        yield frame.to_ndarray().T
                        continue
                    if form != made_for:  # it may change where recordings were joined
                        made_for = form
                        resampler = av.AudioResampler(*wanted)
                    frame.pts = None
                    yield from (part.to_ndarray().T for part in resampler.resample(frame))
        except av.error.FFmpegError as error:
            raise BrokenOff(f"FFmpeg: {error.strerror}") from None
        if lost_s >= LEAST_MISSING_S:
            raise BrokenOff(f"FFmpeg cannot decode {lost_s:.1f} s of it")
        if self.missing_s:
            raise BrokenOff("its last page is torn")


def _mp3_frames(source: IO[bytes]) -> float:
    """MPEG frames that the header (Xing, Info) of an MP3 file states; infinity without one."""
    head = source.read(10)
    if head[:3] == b"ID3":  # a tag, whose length is in four times seven bits
        size = sum(byte << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        source.seek(10 + size)
    found = re.search(rb"(?:Xing|Info)\0\0\0(.)(.{4})", source.read(4096), re.DOTALL)
    return int.from_bytes(found[2], "big") if found and found[1][0] & 1 else math.inf


def _goes_on(source: IO[bytes]) -> bool:
    """Whether a WAV file has sound behind the samples that it states: what follows them is no chunk
    of its own, or is another file.
    """
    source.seek(0)
    kind, _, form = struct.unpack("<4sI4s", source.read(12).ljust(12, b"\0"))
    if (kind, form) != (b"RIFF", b"WAVE"):
        return False
    name = b""
    while name != b"data":
        header = source.read(8)
        if len(header) < 8:
            return False
        name, size = struct.unpack("<4sI", header)
        source.seek(size + size % 2, os.SEEK_CUR)
    following = source.read(LEAST_CHUNK)
    is_chunk = following[:4].isascii() and following[:4].decode().isprintable()
    return len(following) == LEAST_CHUNK and (not is_chunk or following[:4] == b"RIFF")


def _ends_in_page(source: IO[bytes]) -> bool:
    """Whether an Ogg file ends within a page."""
    end = source.seek(0, os.SEEK_END)
    source.seek(max(0, end - 2 * OGG_PAGE))
    tail = source.read()
    start = tail.rfind(b"OggS")
    if not 0 <= start <= len(tail) - 27:
        return start >= 0
    segments = tail[start + 27 : start + 27 + tail[start + 26]]
    return len(tail) < start + 27 + len(segments) + sum(segments)


def open_sound(sound: Sound) -> SoundReader:
    """The opened recording, at its first sample also for a part of it.

    By its content, not its name: libsndfile reads a file whose header states its length, FFmpeg's
    libraries (PyAV) read everything else.

    Raises:
        ValueError: In one line, for what is no sound file.
    """
    path = sound.path
    if sound.error:
        raise ValueError(sound.error)
    if sound.data is None:
        _expect_file(path)
    else:
        expect(len(sound.data) > 0, "audio", "a sound file", f"0 bytes in {path.name}")
    reader = _exact(sound)
    try:
        reader = reader or Stream(sound)
    except ImportError:
        raise ValueError(f"audio: {path.name} needs PyAV: pip install av.") from None
    except ValueError as error:
        raise ValueError(f"audio: {path.name} cannot be read (FFmpeg: {error}).") from None
    got = f"{reader.rate_hz} Hz in {path.name}"
    expect(100 <= reader.rate_hz <= 1_000_000, "audio", "100 to 1,000,000 Hz", got)
    return reader


def _exact(sound: Sound) -> SoundReader | None:
    """The reader of a file whose header states its length; None for any other."""
    import soundfile

    with bytes_of(sound) as source:
        if not source.read(4).startswith(EXACT) or _goes_on(source):
            return None
    try:
        file = soundfile.SoundFile(stored(sound))
    except soundfile.LibsndfileError:  # a codec that libsndfile has not
        return None
    if 0 < file.frames < UNKNOWN_FRAMES and not file.subtype.startswith("MPEG"):
        return ExactFile(file)
    file.close()
    return None


def expect_whole(path: Path) -> None:
    """ValueError, in one line, for what is no sound file, or of which libsndfile reads a part.

    That is what lhotse reads with. The end is decoded, since the header of a FLAC file that is cut
    short promises all of it; other files than those with an exact header are decoded whole.

    Args:
        path: The file.
    """
    import soundfile

    found = 0
    with open_sound(Sound(path)) as file:
        wanted = file.frames
        try:
            if isinstance(file, ExactFile):
                found = file.file.frames - 1
                file.skip(found)
            else:
                wanted = soundfile.info(stored(Sound(path))).frames
            while len(samples := file.read(2**20)):
                found += len(samples)
            whole = abs(found - wanted) < LEAST_MISSING_S * file.rate_hz
        except (BrokenOff, soundfile.LibsndfileError):
            whole = False
    expect_all(whole, path)


def expect_all(whole: bool, path: Path) -> None:
    """ValueError for a file that is not whole."""
    remedy = f"The file is truncated, or its header is wrong. {CONVERT}"
    expect(whole, "audio", "a whole file", f"a part of {path.name}", remedy)


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
