"""Corpora that lie in a folder: LibriSpeech's layout, or sounds with texts."""

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lhotse import Recording
from lhotse.recipes.librispeech import prepare_librispeech
from lhotse.utils import fastcopy
from tqdm import tqdm

from asrkit.data.corpora.manifests import SPLITS, transcribed_cut
from asrkit.data.utterances import sound_paths
from asrkit.shapes import expect
from asrkit.sound_files import CONVERT, UNREAD, expect_whole, listed

Parts = tuple[dict[str, list[Any]], list[str]]  # cuts of each part, and what was left out


def read_folder(folder: Path, jobs: int, progress: bool) -> Parts:
    """Cuts of each part of a corpus in a folder, and a line for each utterance left out.

    Args:
        folder: In LibriSpeech's layout (speaker/chapter/*.trans.txt below each part), or with sound
            files that have a .txt beside them.
        jobs: Threads that read.
        progress: Show a progress bar.
    """
    transcripts = sorted(folder.rglob("*.trans.txt"))
    if transcripts:
        sets, left_out = _read_librispeech_parts(folder, transcripts, jobs, progress)
        _expect_whole_sounds(sets, jobs)
        return sets, left_out
    sounds = [folder / name for name in listed(folder)]
    expect(
        any(path.with_suffix(".txt").is_file() for path in sounds),
        "corpus",
        "*.trans.txt, or sound files each with a .txt beside it",
        f"none of them in {folder}",
    )
    return _read_sounds(folder, sounds, jobs, progress)


def _expect_whole_sounds(sets: dict[str, list[Any]], jobs: int) -> None:
    """ValueError that names a sound file of the cuts which cannot be read to its end."""
    paths = {path for cuts in sets.values() for cut in cuts for path in sound_paths(cut)}

    def check(path: Path) -> None:
        try:
            expect_whole(path)
        except ValueError as error:
            raise _unreadable(path, error) from None

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(check, sorted(paths)))


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"corpus: {path} cannot be read ({_one_line(error, 200)}). Mend or remove it."
    )


def _read_librispeech_parts(
    folder: Path, transcripts: Sequence[Path], jobs: int, progress: bool
) -> Parts:
    """Parts in LibriSpeech's layout, wherever they lie in `folder`."""
    parts = sorted({path.parents[2] for path in transcripts})
    names = {part.name for part in parts}
    inside = all(part.is_relative_to(folder) for part in parts)
    expect(
        inside and len(names) == len(parts),
        "corpus",
        "parts of different names, each speaker/chapter/*.trans.txt",
        ", ".join(map(str, parts[:3])),
    )
    sets: dict[str, list[Any]] = {}
    left_out: list[str] = []
    for part in parts:
        some, without_sound = read_librispeech(part.parent, [part.name], jobs, progress)
        sets |= some
        left_out += without_sound
    return sets, left_out


def read_librispeech(folder: Path, parts: Sequence[str], jobs: int, progress: bool) -> Parts:
    """Parts of a folder in LibriSpeech's layout, by lhotse's recipe, with text in lower case.

    Args:
        folder: That holds the parts.
        parts: Names of folders in it.
        jobs: Threads of the recipe.
        progress: Show the recipe's progress bars.

    Returns:
        Cuts of each part, and a line for each line of text without a sound.
    """
    # The recipe's bars cannot be switched off.
    with contextlib.redirect_stderr(sys.stderr if progress else io.StringIO()):
        try:
            tables = prepare_librispeech(folder, dataset_parts=parts, num_jobs=jobs)
        except Exception as error:  # a bare assert, a failed unpacking, or lhotse's own classes
            why = f"{type(error).__name__} {_one_line(error, 200)}".strip()
            raise ValueError(
                f"corpus: lhotse's prepare_librispeech cannot read {folder} ({why}). "
                "Mend what is damaged there."
            ) from None
    sets = {part: _part_cuts(**tables[part]) for part in parts}
    with_sound = {cut.id for cuts in sets.values() for cut in cuts}
    names = [name for part in parts for name in _transcribed_names(folder / part)]
    return sets, [f"no sound of {name}" for name in names if name not in with_sound]


def _part_cuts(recordings: Iterable[Any], supervisions: Iterable[Any]) -> list[Any]:
    """Cuts of recordings with one supervision each, sorted by id, with text in lower case."""
    of_recording = {
        supervision.recording_id: supervision.transform_text(str.lower)
        for supervision in supervisions
    }
    cuts = [
        fastcopy(recording.to_cut(), supervisions=[of_recording[recording.id]])
        for recording in recordings
    ]
    return sorted(cuts, key=lambda cut: cut.id)  # the recordings come as the file system has them


def _transcribed_names(part: Path) -> list[str]:
    """Names of the utterances that the transcripts of a part list."""
    names = []
    for file in sorted(part.rglob("*.trans.txt")):
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        names += [line.split()[0] for line in lines if line.strip()]
    return names


def _one_line(error: Exception, length: int) -> str:
    return " ".join(str(error).split())[:length]


def _read_sounds(folder: Path, sounds: Sequence[Path], jobs: int, progress: bool) -> Parts:
    """Sound files with a text beside them; those without are left out.

    A part is the first folder where that is called train, dev or test, or like train-x; else all.
    """
    left_out = []
    readable = []
    for path in sounds:
        if path.is_dir():
            left_out.append(f"no permission to read {path}")
        elif path.suffix.lower() in UNREAD:
            left_out.append(f"no decoder for {path} ({CONVERT.rstrip('.')})")
        else:
            readable.append(path)
    names = Counter(path.with_suffix("") for path in readable)
    repeated = [str(name) for name, count in names.items() if count > 1]
    expect(
        not repeated,
        "corpus",
        "one sound file of each name",
        f"several of {', '.join(repeated[:3])}",
        "Keep one of each.",
    )

    def read(path: Path) -> Any:
        return _read_sound(path, folder)

    sets: dict[str, list[Any]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(read, readable)
        cuts = tqdm(results, "reading", len(readable), unit="utt", disable=not progress)
        for path, cut in zip(readable, cuts, strict=True):
            if cut is None:
                left_out.append(f"no text of {path}")
            else:
                sets.setdefault(_part_of(path, folder), []).append(cut)
    return sets, left_out


def _part_of(path: Path, folder: Path) -> str:
    """The split that the file's top folder below `folder` is named after; "all" for none."""
    top = path.relative_to(folder).parts[0]
    kind = top.partition("-")[0]
    in_subfolder = path.parent != folder
    if in_subfolder and kind in SPLITS:
        return top
    return "all"


def _read_sound(path: Path, folder: Path) -> Any:
    """The cut of a sound file; None where it has no text."""
    text_file = path.with_suffix(".txt")
    name = path.relative_to(folder).with_suffix("").as_posix()
    try:
        if not text_file.is_file():
            return None
        text = " ".join(text_file.read_text(encoding="utf-8-sig").split())
        if not text:
            return None
        expect_whole(path)  # lhotse would take the part of a file that is there
        recording = Recording.from_file(path, recording_id=name)
        expect(recording.num_samples > 0, "sound", "samples", "none")
        return transcribed_cut(recording, text, "unknown", {})
    except Exception as error:  # classes of soundfile, audioread and lhotse
        raise _unreadable(path, error) from None
