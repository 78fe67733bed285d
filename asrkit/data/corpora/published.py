"""Corpora made ready for training, as lhotse cuts in a folder.

They are synthesised, loaded from the network, checked and unpacked, or read from a local folder.
"""

import gzip
import json
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lhotse.recipes.yesno import prepare_yesno
from lhotse.utils import fastcopy
from tqdm import tqdm

from asrkit.data.corpora import synthetic
from asrkit.data.corpora.fetch import fetch
from asrkit.data.corpora.folders import (
    Parts,
    read_folder,
    read_librispeech,
    recipe_cuts,
    run_recipe,
)
from asrkit.data.corpora.manifests import RATE_HZ
from asrkit.files import atomic, home, lock
from asrkit.shapes import expect

OPENSLR = "https://www.openslr.org/resources"
MB = 1e6
UNPACKED = 1.1  # unpacked bytes for each byte of an archive: gzip hardly compresses FLAC
# Kinds of utterances of the corpora that are synthesised.
SPOKEN: dict[str, tuple[str, ...]] = {"digits": ("digits",), "spoken_commands": synthetic.KINDS}


@dataclass(frozen=True)
class RemoteArchive:
    """An archive at `openslr`/<part>.tar.gz below a mirror: its size in bytes and its checksum."""

    openslr: int
    size: int
    checksum: str


# Checksums: torchaudio 2.11 (datasets/librispeech.py, yesno.py), md5sum.txt of openslr.org/31;
# sizes: tensorflow_datasets
ARCHIVES = {
    "yesno": {
        "waves_yesno": RemoteArchive(
            1, 4_703_754, "sha256:c3f49e0cca421f96b75b41640749167b52118f232498667ca7a5f9416aef8e73"
        )
    },
    "mini_librispeech": {
        "dev-clean-2": RemoteArchive(31, 126_046_265, "md5:6d7ab67ac6a1d2c993d050e16d61080d"),
        "train-clean-5": RemoteArchive(31, 332_954_390, "md5:5df7d4e78065366204ca6845bb08f490"),
    },
    "librispeech": {
        "dev-clean": RemoteArchive(
            12,
            337_926_286,
            "sha256:76f87d090650617fca0cac8f88b9416e0ebf80350acb97b343a85fa903728ab3",
        ),
        "dev-other": RemoteArchive(
            12,
            314_305_928,
            "sha256:12661c48e8c3fe1de2c1caa4c3e135193bfb1811584f11f569dd12645aa84365",
        ),
        "test-clean": RemoteArchive(
            12,
            346_663_984,
            "sha256:39fde525e59672dc6d1551919b1478f724438a95aa55f874b576be21967e6c23",
        ),
        "test-other": RemoteArchive(
            12,
            328_757_843,
            "sha256:d09c181bba5cf717b3dee7d4d592af11a3ee3a09e08ae025c5506f6ebe961c29",
        ),
        "train-clean-100": RemoteArchive(
            12,
            6_387_309_499,
            "sha256:d4ddd1d5a6ab303066f14971d768ee43278a5f2a0aa43dc716b0e64ecbbbf6e2",
        ),
        "train-clean-360": RemoteArchive(
            12,
            23_049_477_885,
            "sha256:146a56496217e96c14334a160df97fffedd6e0a04e66b9c5af0d40be3c792ecf",
        ),
        "train-other-500": RemoteArchive(
            12,
            30_593_501_606,
            "sha256:ddb22f27f96ec163645d53215559df6aa36515f26e01dd70798188350adcb6d2",
        ),
    },
}
DEFAULT = {"librispeech": ("dev-clean", "test-clean", "train-clean-100")}  # 7 of 61 GB


def prepare_corpora(
    corpus: str | Path,
    *,
    out: str | Path | None = None,
    parts: Sequence[str] = (),
    mirror: str = OPENSLR,
    jobs: int = 2,
    progress: bool = True,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Make a corpus ready for training: write cuts_<part>.jsonl.gz, 16 kHz when read.

    A run that was killed is finished by the next one: archives are loaded from where they were cut
    off; unpacking and writing start anew.

    Args:
        corpus: digits or spoken_commands (synthesised here); yesno, mini_librispeech or librispeech
            (from `mirror`); or a folder of LibriSpeech's layout (*.trans.txt), of lhotse recordings
            and supervisions, or of sound files each with a .txt beside it. Texts become lower case
            but for the last two.
        out: Folder for archives and cuts; default home()/corpora/<name>.
        parts: Names of the parts to prepare, or "all". By default all parts, but of librispeech
            only 7 of its 61 GB.
        mirror: Where archives are loaded from.
        jobs: Threads that read, or processes that synthesise.
        progress: Show progress bars.
        say: Called with lines for the user.

    Returns:
        `out`, `utterances`, `hours`, `left_out` (number of utterances), `parts` (utterances of
        each) and `manifests` (paths of the files written), as JSON.

    Raises:
        ValueError: A wrong argument, or a corpus that is damaged or empty.
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
        sets = _spoken(SPOKEN[name], jobs, progress)
        left_out: list[str] = []
    elif name in ARCHIVES:
        _load_archives(name, to, parts, mirror, progress, say)
        sets, left_out = _read_archives(name, to, parts, jobs, progress)
    else:
        sets, left_out = read_folder(folder, jobs, progress)
    sets = {part: sets[part] for part in _chosen(parts, [*sets], [*sets])}
    _check_and_tell(folder, sets, left_out, say)
    return _write(to, sets, left_out)


def _check_and_tell(
    folder: Path, sets: dict[str, list[Any]], left_out: Sequence[str], say: Callable[[str], None]
) -> None:
    """Refuse an empty corpus, and say what is left out of one that is not."""
    reasons = "; ".join(left_out[:3])
    expect(
        any(sets.values()),
        "corpus",
        "at least one utterance",
        f"none in {folder}",
        f"Left out: {reasons}.",
    )
    if left_out:
        if len(left_out) > 3:
            reasons += "; …"
        say(f"{len(left_out)} left out: {reasons}")


def _chosen(parts: Sequence[str], known: Sequence[str], default: Sequence[str]) -> list[str]:
    """Those of the `known` parts that `parts` names, or by default `default`."""
    unknown = sorted({*parts} - {*known, "all"})
    expect(not unknown, "parts", f"some of {', '.join(known)}", ", ".join(unknown))
    if "all" in parts:
        return list(known)
    return [part for part in known if part in (parts or default)]


def _write(to: Path, sets: dict[str, list[Any]], left_out: Sequence[str]) -> dict[str, Any]:
    """Write the cuts of each part into the folder `to`; the summary."""
    manifests = []
    for part, cuts in sets.items():
        path = to / f"cuts_{part}.jsonl.gz"
        _write_cuts(path, part, cuts)
        manifests.append(str(path))
    counts = {part: len(cuts) for part, cuts in sets.items()}
    hours = sum(cut.duration for cuts in sets.values() for cut in cuts) / 3600
    return {
        "out": str(to),
        "utterances": sum(counts.values()),
        "hours": round(hours, 3),
        "left_out": len(left_out),
        "parts": counts,
        "manifests": manifests,
    }


def _write_cuts(path: Path, part: str, cuts: Iterable[Any]) -> None:
    """Write cuts as JSON lines, resampled when read; those without a split get that of the part."""

    def add_split(supervision: Any) -> Any:
        return fastcopy(supervision, custom={"split": part, **(supervision.custom or {})})

    with atomic(path) as new, gzip.open(new, "wt", encoding="utf-8") as file:
        for cut in cuts:
            cut = cut.map_supervisions(add_split)
            if cut.sampling_rate != RATE_HZ:
                cut = cut.resample(RATE_HZ)
            file.write(json.dumps(cut.to_dict(), ensure_ascii=False) + "\n")


def _spoken(kinds: Sequence[str], jobs: int, progress: bool) -> dict[str, list[Any]]:
    sets = synthetic.spoken_commands(kinds=kinds, workers=jobs, progress=progress)
    return {split: list(cuts) for split, cuts in sets.items()}


def _archive_parts(name: str, parts: Sequence[str]) -> list[str]:
    """Archives of a corpus to load; yesno has one, whose parts are known once it is read."""
    archives = [*ARCHIVES[name]]
    if name == "yesno":
        return archives
    return _chosen(parts, archives, DEFAULT.get(name, archives))


def _unpacked_folder(name: str, to: Path) -> Path:
    """Where the archives of a corpus put their parts."""
    return to if name == "yesno" else to / "LibriSpeech"


def _load_archives(
    name: str,
    to: Path,
    parts: Sequence[str],
    mirror: str,
    progress: bool,
    say: Callable[[str], None],
) -> None:
    """Load and unpack those archives of a corpus that are not complete yet."""
    folder = _unpacked_folder(name, to)
    chosen = _archive_parts(name, parts)
    busy = (
        f"out: expected a folder that nobody else is preparing, got {to}. "
        "Wait, or pass another --out."
    )
    with lock(to, refused=busy):
        todo = {
            part: ARCHIVES[name][part]
            for part in chosen
            if not (folder / part / ".completed").is_file()
        }
        if todo:
            _check_disk(todo, to, mirror, say)
        for part, one in todo.items():
            archive = to / f"{part}.tar.gz"
            url = f"{mirror.rstrip('/')}/{one.openslr}/{archive.name}"
            fetch(url, archive, checksum=one.checksum, progress=progress)
            _unpack(archive, to, folder / part, progress)


def _check_disk(
    todo: dict[str, RemoteArchive], to: Path, mirror: str, say: Callable[[str], None]
) -> None:
    """Say what will be loaded; ValueError where the disk has no room for it."""
    size = sum(archive.size for archive in todo.values())
    held = sum(path.stat().st_size for part in todo for path in to.glob(f"{part}.tar.gz*"))
    load = max(0, size - held) / MB
    need = (size * (1 + UNPACKED) - held) / MB
    free = shutil.disk_usage(to).free / MB
    say(f"{', '.join(todo)}: {load:,.0f} MB to load from {mirror}, {need:,.0f} MB of disk in {to}")
    expect(
        need < free,
        "out",
        f"{need:,.0f} MB free",
        f"{free:,.0f} in {to}",
        "Pass another --out, or fewer --parts.",
    )


def _read_archives(name: str, to: Path, parts: Sequence[str], jobs: int, progress: bool) -> Parts:
    """Cuts of each part of an unpacked corpus, and what was left out."""
    folder = _unpacked_folder(name, to)
    if name != "yesno":
        return read_librispeech(folder, _archive_parts(name, parts), jobs, progress)
    tables = run_recipe(prepare_yesno, folder / "waves_yesno")
    return recipe_cuts({part: manifests.values() for part, manifests in tables.items()}), []


def _unpack(archive: Path, to: Path, folder: Path, progress: bool) -> None:
    """Unpack `archive` into `to`, where it makes `folder`, from nothing.

    The folder is complete once it holds .completed, which lhotse's recipes use as well.
    """
    shutil.rmtree(folder, ignore_errors=True)
    # Python 3.11.4 and later can refuse members that would leave the folder.
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    try:
        with tarfile.open(archive) as tar:
            for member in tqdm(tar, f"unpacking {archive.name}", unit="file", disable=not progress):
                tar.extract(member, to, **options)
        (folder / ".completed").touch()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        if getattr(error, "errno", None):  # the disk is at fault: it is full, for example
            argument = "out"
            remedy = "Mend that"
        else:
            argument = "mirror"
            remedy = "Remove the file"
        raise ValueError(
            f"{argument}: expected {folder.name} of {archive}, got {error}. {remedy} and run again."
        ) from None
