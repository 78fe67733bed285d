"""Corpora in a folder: LibriSpeech's layout, or sound files with texts."""

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from lhotse import Recording
from lhotse.recipes.librispeech import prepare_librispeech
from lhotse.utils import fastcopy
from tqdm import tqdm

from asrkit.data.corpora.manifests import split_of, transcribed_cut
from asrkit.data.utterances import sound_paths
from asrkit.shapes import expect
from asrkit.sound_files import UNREAD, listed
from asrkit.sound_readers import expect_whole

Parts = tuple[dict[str, list[Any]], list[str]]  # cuts of each part, and a line for each omission


def read_folder(folder: Path, jobs: int, progress: bool) -> Parts:
    """Cuts of each part of a corpus in a folder, and a line for each omitted utterance.

    Args:
        folder: A folder in LibriSpeech's layout (speaker/chapter/*.trans.txt in each part), or with
            sound files and a .txt for each.
        jobs: Number of threads that read.
        progress: Show a progress bar.
    """
    parts = sorted({path.parents[2] for path in folder.rglob("*.trans.txt")})
    if not parts:
        return _read_sounds(folder, jobs, progress)
    inside = all(part.is_relative_to(folder) for part in parts)
    expect(
        inside and len({part.name for part in parts}) == len(parts),
        "corpus",
        "parts of different names, each speaker/chapter/*.trans.txt",
        ", ".join(map(str, parts[:3])),
    )
    sets, left_out = read_librispeech(parts, jobs, progress)
    sounds = [path for cuts in sets.values() for cut in cuts for path in sound_paths(cut)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(expect_whole, sounds))  # lhotse would read truncated files
    return sets, left_out


def _unreadable(path: Path, error: Exception) -> ValueError:
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return ValueError(f"corpus: {path} cannot be read ({why}). Repair or remove it.")


def read_librispeech(parts: Sequence[Path], jobs: int, progress: bool) -> Parts:
    """Folders in LibriSpeech's layout, by lhotse's recipe, with text in lower case.

    Args:
        parts: The folders.
        jobs: Number of threads of the recipe.
        progress: Show the recipe's progress bars.

    Returns:
        Cuts of each part by its name, and a line for each text without a sound.
    """
    sets = {}
    left_out: list[str] = []
    for part in parts:
        try:
            # the recipe's bars cannot be switched off
            with contextlib.redirect_stderr(sys.stderr if progress else io.StringIO()):
                table = prepare_librispeech(
                    part.parent, dataset_parts=part.name, normalize_text="lower", num_jobs=jobs
                )[part.name]
        except Exception as error:  # a bare assert, a failed unpacking, or one of lhotse's errors
            raise _unreadable(part, error) from None
        supervisions = {part.recording_id: part for part in table["supervisions"]}
        cuts = {
            sound.id: fastcopy(sound.to_cut(), supervisions=[supervisions[sound.id]])
            for sound in table["recordings"]
        }
        sets[part.name] = [cuts[name] for name in sorted(cuts)]
        for file in sorted(part.rglob("*.trans.txt")):
            lines = file.read_text(encoding="utf-8-sig").splitlines()
            names = [line.split()[0] for line in lines if line.strip()]
            left_out += [f"no sound of {name}" for name in names if name not in cuts]
    return sets, left_out


def _read_sounds(folder: Path, jobs: int, progress: bool) -> Parts:
    """Sound files with a .txt; those without are omitted.

    The part is the first folder, if its name means train, dev or test; else "all".
    """
    left_out = []
    readable = []
    for path in [folder / name for name in listed(folder)]:
        if path.is_dir():
            left_out.append(f"no permission to read {path}")
        elif path.suffix.lower() in UNREAD:
            left_out.append(f"no decoder for {path}: convert it first")
        else:
            readable.append(path)
    names = Counter(path.with_suffix("") for path in readable)
    repeated = ", ".join(str(name) for name, count in names.items() if count > 1)
    got = f"several of {repeated}"
    expect(not repeated, "corpus", "one sound file of each name", got, "Keep one of each.")
    sets: dict[str, list[Any]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(_read_sound, readable, repeat(folder))
        cuts = tqdm(results, "reading", len(readable), unit="utt", disable=not progress)
        for path, cut in zip(readable, cuts, strict=True):
            if cut is None:
                left_out.append(f"no text of {path}")
                continue
            top, *below = path.relative_to(folder).parts
            part = top if below and split_of(top) else "all"
            sets.setdefault(part, []).append(cut)
    return sets, left_out


def _read_sound(path: Path, folder: Path) -> Any:
    """The cut of a sound file in `folder`; None if it has no text."""
    text_file = path.with_suffix(".txt")
    try:
        text = text_file.read_text(encoding="utf-8-sig") if text_file.is_file() else ""
        if not text.strip():
            return None
        expect_whole(path)
        name = path.relative_to(folder).with_suffix("").as_posix()
        recording = Recording.from_file(path, recording_id=name)
        expect(recording.num_samples > 0, "sound", "samples", "none")
        return transcribed_cut(recording.to_cut(), " ".join(text.split()), "unknown", {})
    except Exception as error:  # errors of soundfile, audioread and lhotse
        raise _unreadable(path, error) from None
