"""What the bytes of MP3, WAV and Ogg files say about their length, where libraries misread them."""

import math
import os
import re
import struct
from typing import IO

MIN_TRAILING = 1024  # bytes after the samples of a WAV file that are more than a remainder
OGG_PAGE = 65_307  # largest size of a page in bytes


def mp3_frames(source: IO[bytes]) -> float:
    """Number of MPEG frames by the header (Xing, Info) of an MP3 file; infinity without one."""
    head = source.read(10)
    if head[:3] == b"ID3":  # a tag, whose length has four times seven bits
        size = sum(byte << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        source.seek(10 + size)
    header = re.search(rb"(?:Xing|Info)\0\0\0(.)(.{4})", source.read(4096), re.DOTALL)
    return int.from_bytes(header[2], "big") if header and header[1][0] & 1 else math.inf


def has_sound_after_data(source: IO[bytes]) -> bool:
    """Whether a WAV file has sound after the samples that its header states: another file, or bytes
    that are not chunks.
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
    position = source.tell()
    end = source.seek(0, os.SEEK_END)
    if end - position < MIN_TRAILING:
        return False
    while position < end - 8:
        source.seek(position)
        name, size = struct.unpack("<4sI", source.read(8))
        position += 8 + size + size % 2
        if name == b"RIFF" or position > end + 1:
            return True
    return False


def last_page_is_truncated(source: IO[bytes]) -> bool:
    """Whether an Ogg file ends within a page."""
    end = source.seek(0, os.SEEK_END)
    source.seek(max(0, end - 2 * OGG_PAGE))
    tail = source.read()
    page = tail[tail.rfind(b"OggS") :]
    segments = page[27 : 27 + page[26]] if len(page) > 26 else b""
    return len(page) < 27 + len(segments) + sum(segments)
