"""Preparation of corpora for training, as lhotse cuts in a folder.

They are synthesised, downloaded by lhotse, or read from a local folder.
"""

import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

from lhotse.recipes.librispeech import LIBRISPEECH, MINI_LIBRISPEECH, download_librispeech
from lhotse.serialization import save_to_jsonl

from asrkit.data.corpora import synthetic
from asrkit.data.corpora.folders import read_folder, read_librispeech
from asrkit.data.corpora.manifests import RATE_HZ
from asrkit.files import atomic, home, lock
from asrkit.shapes import expect

OPENSLR = "https://www.openslr.org/resources"
ARCHIVES = {  # parts of the corpora that lhotse downloads
    "mini_librispeech": MINI_LIBRISPEECH,
    "librispeech": LIBRISPEECH,
}
# Kinds of utterances in the synthesised corpora.
SPOKEN: dict[str, tuple[str, ...]] = {"digits": ("digits",), "spoken_commands": synthetic.KINDS}

DEFAULT = {"librispeech": ("dev-clean", "test-clean", "train-clean-100")}  # 7 of 61 GB


def prepare_corpora(
    corpus: str | Path,
    *,
    out: str | Path | None = None,
    parts: Sequence[str] = (),
    mirror: str = OPENSLR,
    jobs: int = 2,
    progress: bool = True,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Prepare a corpus for training: write cuts_<part>.jsonl.gz, with audio at 16 kHz on reading.

    The next run completes one that was killed: lhotse resumes the download of an archive; unpacking
    and writing start over.

    Args:
        corpus: digits or spoken_commands (synthesised here); mini_librispeech or librispeech (from
            `mirror`); or a folder in LibriSpeech's layout (*.trans.txt), whose texts become lower
            case, or a folder of sound files with a .txt for each.
        out: Folder for archives and cuts; the default is home()/corpora/<name>.
        parts: Names of the parts to prepare, or "all". The default is all parts, but for
            librispeech only 7 of its 61 GB.
        mirror: Server of the archives.
        jobs: Number of threads that read, or of processes that synthesise.
        progress: Show progress bars.
        log: Called with lines for the user.

    Returns:
        `out`, `utterances`, `hours`, `left_out` (number of utterances), `parts` (utterances of
        each) and `manifests` (paths of the files written), as JSON.

    Raises:
        ValueError: An invalid argument, or a damaged or empty corpus.
        ConnectionError: The mirror does not answer.
    """
    name = str(corpus)
    folder = Path(corpus).resolve()
    expect(jobs >= 1, "jobs", "at least 1", jobs)
    known = [*SPOKEN, *ARCHIVES]
    exists = name in known or folder.is_dir()
    expect(exists, "corpus", f"{', '.join(known)} or a folder", repr(name))
    default_out = home(make=False) / "corpora" / (name if name in known else folder.name)
    to = Path(out or default_out).resolve()
    expect(not to.exists() or to.is_dir(), "out", "a folder", repr(str(to)))
    if name in SPOKEN:
        sets = {
            split: list(cuts)
            for split, cuts in synthetic.spoken_commands(
                kinds=SPOKEN[name], workers=jobs, progress=progress
            ).items()
        }
        left_out: list[str] = []
    elif name in ARCHIVES:
        archives = _chosen(parts, ARCHIVES[name], DEFAULT.get(name, ()))
        _download(to, archives, mirror)
        folders = [to / "LibriSpeech" / archive for archive in archives]
        sets, left_out = read_librispeech(folders, jobs, progress)
    else:
        sets, left_out = read_folder(folder, jobs, progress)
    sets = {part: sets[part] for part in _chosen(parts, [*sets])}
    reasons = "; ".join(left_out[:3])
    wanted = "*.trans.txt, or sound files with a .txt for each"
    remedy = f"Left out: {reasons}." if left_out else ""
    expect(any(sets.values()), "corpus", wanted, f"none of them in {folder}", remedy)
    if left_out:
        log(f"{len(left_out)} left out: {reasons}{'; …' if len(left_out) > 3 else ''}")
    manifests = {part: to / f"cuts_{part}.jsonl.gz" for part in sets}
    for part, path in manifests.items():
        for supervision in (each for cut in sets[part] for each in cut.supervisions):
            supervision.custom = {"split": part, **(supervision.custom or {})}
        with lock(to), atomic(path) as new:
            save_to_jsonl((cut.resample(RATE_HZ).to_dict() for cut in sets[part]), new)
    counts = {part: len(cuts) for part, cuts in sets.items()}
    hours = sum(cut.duration for cuts in sets.values() for cut in cuts) / 3600
    return {
        "out": str(to),
        "utterances": sum(counts.values()),
        "hours": round(hours, 3),
        "left_out": len(left_out),
        "parts": counts,
        "manifests": [str(path) for path in manifests.values()],
    }


def _chosen(parts: Sequence[str], known: Sequence[str], default: Sequence[str] = ()) -> list[str]:
    """The `known` parts that `parts` names; by default `default`, if any, else all."""
    unknown = sorted({*parts} - {*known, "all"})
    expect(not unknown, "parts", f"some of {', '.join(known)}", ", ".join(unknown))
    wanted = parts or default or known
    return [part for part in known if part in wanted or "all" in wanted]


def _download(to: Path, archives: Sequence[str], mirror: str) -> None:
    """Download and unpack those archives of LibriSpeech that are not complete yet."""
    with lock(to):
        try:
            download_librispeech(to, archives, base_url=mirror.rstrip("/"))
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise ValueError(
                f"mirror: expected whole archives in {to}, got {error}. "
                "Remove the damaged *.tar.gz and run again."
            ) from None
        except (URLError, ValueError) as error:
            raise ConnectionError(
                f"mirror: expected an answer from {mirror}, got {error}. Is the network up?"
            ) from None
