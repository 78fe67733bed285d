"""Corpora made ready for training: loaded, checked and unpacked, or found in a folder, and written
as lhotse cuts.
"""

import contextlib
import gzip
import io
import json
import re
import shutil
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lhotse import Recording
from lhotse.recipes.librispeech import prepare_librispeech
from lhotse.recipes.yesno import prepare_yesno
from lhotse.utils import fastcopy
from tqdm import tqdm

from asrkit.data import corpora
from asrkit.data.corpora.fetch import fetch
from asrkit.files import atomic, home, lock
from asrkit.shapes import expect

OPENSLR, MB, UNPACKED = (
    "https://www.openslr.org/resources",
    1e6,
    1.1,
)  # FLAC hardly shrinks in an archive
SOUNDS = {".wav", ".flac", ".ogg", ".opus", ".mp3"}
SPOKEN: dict[str, tuple[str, ...]] = {"digits": ("digits",), "spoken_commands": corpora.KINDS}
Parts = tuple[dict[str, list[Any]], list[str]]  # cuts of each part, and what was left out


@dataclass(frozen=True)
class Archive:
    """`openslr`/<part>.tar.gz below a mirror: its bytes and its checksum."""

    openslr: int
    size: int
    checksum: str


# Checksums: torchaudio 2.11 (datasets/librispeech.py, yesno.py), md5sum.txt of openslr.org/31;
# sizes: tensorflow_datasets
ARCHIVES = {
    "yesno": {
        "waves_yesno": Archive(
            1, 4_703_754, "sha256:c3f49e0cca421f96b75b41640749167b52118f232498667ca7a5f9416aef8e73"
        )
    },
    "mini_librispeech": {
        "dev-clean-2": Archive(31, 126_046_265, "md5:6d7ab67ac6a1d2c993d050e16d61080d"),
        "train-clean-5": Archive(31, 332_954_390, "md5:5df7d4e78065366204ca6845bb08f490"),
    },
    "librispeech": {
        "dev-clean": Archive(
            12,
            337_926_286,
            "sha256:76f87d090650617fca0cac8f88b9416e0ebf80350acb97b343a85fa903728ab3",
        ),
        "dev-other": Archive(
            12,
            314_305_928,
            "sha256:12661c48e8c3fe1de2c1caa4c3e135193bfb1811584f11f569dd12645aa84365",
        ),
        "test-clean": Archive(
            12,
            346_663_984,
            "sha256:39fde525e59672dc6d1551919b1478f724438a95aa55f874b576be21967e6c23",
        ),
        "test-other": Archive(
            12,
            328_757_843,
            "sha256:d09c181bba5cf717b3dee7d4d592af11a3ee3a09e08ae025c5506f6ebe961c29",
        ),
        "train-clean-100": Archive(
            12,
            6_387_309_499,
            "sha256:d4ddd1d5a6ab303066f14971d768ee43278a5f2a0aa43dc716b0e64ecbbbf6e2",
        ),
        "train-clean-360": Archive(
            12,
            23_049_477_885,
            "sha256:146a56496217e96c14334a160df97fffedd6e0a04e66b9c5af0d40be3c792ecf",
        ),
        "train-other-500": Archive(
            12,
            30_593_501_606,
            "sha256:ddb22f27f96ec163645d53215559df6aa36515f26e01dd70798188350adcb6d2",
        ),
    },
}
DEFAULT = {"librispeech": ("dev-clean", "test-clean", "train-clean-100")}  # 7 of 61 GB


def prepare(
    corpus: str | Path,
    *,
    out: str | Path | None = None,
    parts: Sequence[str] = (),
    mirror: str = OPENSLR,
    jobs: int = 2,
    progress: bool = True,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """{out, utterances, hours, left_out, parts, manifests} of a corpus, now in
    out/cuts_<part>.jsonl.gz, 16 kHz when read.

    corpus: digits or spoken_commands (synthesised here); yesno, mini_librispeech or librispeech
    (from `mirror`); or a folder of LibriSpeech's layout (*.trans.txt), of lhotse recordings and
    supervisions, or of sound files each with a .txt beside it. Texts come in lower case but for the
    last two. out: home()/corpora/<name> by default. parts: none is all of them, but of librispeech
    7 of its 61 GB; "all" is all. A run that was killed is finished by the next: archives go on
    where they were, unpacking and writing start anew.
    """
    name, folder = str(corpus), Path(corpus).resolve()
    expect(jobs >= 1, "jobs", "at least 1", jobs)
    known = [*SPOKEN, *ARCHIVES]
    expect(
        name in known or folder.is_dir(), "corpus", f"{', '.join(known)} or a folder", repr(name)
    )
    to = Path(out or home() / "corpora" / (name if name in known else folder.name)).resolve()
    expect(not to.exists() or to.is_dir(), "out", "a folder", repr(str(to)))
    if name in SPOKEN:
        sets, left_out = _spoken(SPOKEN[name], jobs, progress)
    elif name in ARCHIVES:
        sets, left_out = _published(name, to, parts, mirror, jobs, progress, say)
    else:
        sets, left_out = _local(folder, jobs, progress)
    sets = {part: sets[part] for part in _chosen(parts, [*sets], [*sets])}
    expect(
        any(sets.values()),
        "corpus",
        "at least one utterance",
        f"none in {folder}",
        f"Left out: {'; '.join(left_out[:3])}.",
    )
    manifests = [_write(to / f"cuts_{part}.jsonl.gz", part, cuts) for part, cuts in sets.items()]
    if left_out:
        say(f"{len(left_out)} left out: {'; '.join(left_out[:3])}{'; …' * (len(left_out) > 3)}")
    counts = {part: len(cuts) for part, cuts in sets.items()}
    hours = sum(cut.duration for cuts in sets.values() for cut in cuts) / 3600
    summary = {
        "out": str(to),
        "utterances": sum(counts.values()),
        "hours": round(hours, 3),
        "left_out": len(left_out),
    }
    return {**summary, "parts": counts, "manifests": manifests}


def _chosen(parts: Sequence[str], known: Sequence[str], default: Sequence[str]) -> list[str]:
    unknown = sorted({*parts} - {*known, "all"})
    expect(not unknown, "parts", f"some of {', '.join(known)}", ", ".join(unknown))
    return [part for part in known if part in (parts or default) or "all" in parts]


def _write(path: Path, part: str, cuts: Iterable[Any]) -> str:
    with atomic(path) as new, gzip.open(new, "wt", encoding="utf-8") as file:
        for cut in cuts:
            cut = cut.map_supervisions(
                lambda said: fastcopy(said, custom={"split": part, **(said.custom or {})})
            )
            cut = cut if cut.sampling_rate == corpora.RATE_HZ else cut.resample(corpora.RATE_HZ)
            file.write(json.dumps(cut.to_dict(), ensure_ascii=False) + "\n")
    return str(path)


def _spoken(kinds: Sequence[str], jobs: int, progress: bool) -> Parts:
    sets = corpora.spoken_commands(workers=jobs, progress=progress)
    return {
        part: [cut for cut in cuts if cut.supervisions[0].custom["kind"] in kinds]
        for part, cuts in sets.items()
    }, []


def _published(
    name: str,
    to: Path,
    parts: Sequence[str],
    mirror: str,
    jobs: int,
    progress: bool,
    say: Callable[[str], None],
) -> Parts:
    archives, folder = ARCHIVES[name], to if name == "yesno" else to / "LibriSpeech"
    chosen = (
        [*archives]
        if name == "yesno"
        else _chosen(parts, [*archives], DEFAULT.get(name, [*archives]))
    )
    busy = f"out: expected a folder that nobody else is preparing, got {to}. Wait, or pass another --out."
    with lock(to, refused=busy):
        todo = {
            part: archives[part] for part in chosen if not (folder / part / ".completed").is_file()
        }
        if todo:
            size = sum(one.size for one in todo.values())
            held = sum(path.stat().st_size for part in todo for path in to.glob(f"{part}.tar.gz*"))
            need, free = (size * (1 + UNPACKED) - held) / MB, shutil.disk_usage(to).free / MB
            say(
                f"{', '.join(todo)}: {max(0, size - held) / MB:,.0f} MB to load from {mirror}, {need:,.0f} MB of disk in {to}"
            )
            expect(
                need < free,
                "out",
                f"{need:,.0f} MB free",
                f"{free:,.0f} in {to}",
                "Pass another --out, or fewer --parts.",
            )
        for part, one in todo.items():
            archive = to / f"{part}.tar.gz"
            fetch(
                f"{mirror.rstrip('/')}/{one.openslr}/{archive.name}",
                archive,
                checksum=one.checksum,
                progress=progress,
            )
            _unpack(archive, to, folder / part, progress)
    if name == "yesno":
        found = _by_recipe(prepare_yesno, folder / "waves_yesno")
        return _cuts({part: tables.values() for part, tables in found.items()}), []
    return _libri(folder, chosen, jobs, progress)


def _unpack(archive: Path, to: Path, folder: Path, progress: bool) -> None:
    """Make `folder` of `archive`, from nothing; whole once it holds .completed, as lhotse's recipes
    mark it too.
    """
    shutil.rmtree(folder, ignore_errors=True)
    how: dict[str, Any] = (
        {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    )  # since 3.11.4
    try:
        with tarfile.open(archive) as tar:
            for member in tqdm(tar, f"unpacking {archive.name}", unit="file", disable=not progress):
                tar.extract(member, to, **how)
        (folder / ".completed").touch()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        what, remedy = (
            ("out", "Mend that") if getattr(error, "errno", None) else ("mirror", "Remove the file")
        )  # a disk is full
        raise ValueError(
            f"{what}: expected {folder.name} of {archive}, got {error}. {remedy} and run again."
        ) from None


def _by_recipe(recipe: Callable[..., Any], folder: Path, **how: Any) -> Any:
    try:
        return recipe(folder, **how)
    except Exception as error:  # an assert without words, unpacking, lhotse's own
        why = f"{type(error).__name__} {' '.join(str(error).split()):.200}".strip()
        raise ValueError(
            f"corpus: lhotse's {recipe.__name__} cannot read {folder} ({why}). Mend what is damaged there."
        ) from None


def _libri(folder: Path, parts: Sequence[str], jobs: int, progress: bool) -> Parts:
    """`parts` of a folder in LibriSpeech's layout, by lhotse's recipe, in lower case; left out:
    lines without their sound.
    """
    with contextlib.redirect_stderr(
        sys.stderr if progress else io.StringIO()
    ):  # its bars know no switch
        found = _by_recipe(prepare_librispeech, folder, dataset_parts=parts, num_jobs=jobs)
    sets = _cuts({part: found[part].values() for part in parts})
    lines = [
        line.split()[0]
        for part in parts
        for file in sorted((folder / part).rglob("*.trans.txt"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    heard = {cut.id for cuts in sets.values() for cut in cuts}
    return sets, [f"no sound of {name}" for name in lines if name not in heard]


def _cuts(tables: dict[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """A cut a recording, from (recordings, supervisions) of each part, with text in lower case."""
    sets: dict[str, list[Any]] = {}
    for part, (recordings, supervisions) in tables.items():
        said = {one.recording_id: one.transform_text(str.lower) for one in supervisions}
        cuts = [fastcopy(one.to_cut(), supervisions=[said[one.id]]) for one in recordings]
        sets[part] = sorted(cuts, key=lambda cut: cut.id)  # else in the order of the disk
    return sets


def _local(folder: Path, jobs: int, progress: bool) -> Parts:
    texts, tables = (
        sorted(folder.rglob("*.trans.txt")),
        sorted(folder.glob(corpora.TABLES[1].format("*"))),
    )
    if texts:
        parts = sorted({path.parents[2] for path in texts})
        ok = len({part.name for part in parts}) == len(parts) and all(
            part.is_relative_to(folder) for part in parts
        )
        expect(
            ok,
            "corpus",
            "parts of different names, each speaker/chapter/*.trans.txt",
            ", ".join(map(str, parts[:3])),
        )
        sets, left_out = dict[str, list[Any]](), list[str]()
        for part in parts:
            some, without = _libri(part.parent, [part.name], jobs, progress)
            sets, left_out = {**sets, **some}, [*left_out, *without]
        return sets, left_out
    if tables:
        ends = {
            found[1]
            for path in tables
            if (found := re.search(r"supervisions(.*?)\.jsonl", path.name))
        }
        return {
            end.strip("_-.") or "all": [*corpora.from_manifest(folder, part=end)]
            for end in sorted(ends)
        }, []
    sounds = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SOUNDS)
    wanted = (
        "*.trans.txt, lhotse recordings and supervisions, or sound files each with a .txt beside it"
    )
    expect(
        any(path.with_suffix(".txt").is_file() for path in sounds),
        "corpus",
        wanted,
        f"none of them in {folder}",
    )
    return _sounds(folder, sounds, jobs, progress)


def _sounds(folder: Path, sounds: Sequence[Path], jobs: int, progress: bool) -> Parts:
    """Sound files with their texts; a part is the first folder where that is called train, dev or
    test, or like train-x.
    """

    def read(path: Path) -> Any:
        file = path.with_suffix(".txt")
        id_ = path.relative_to(folder).with_suffix("").as_posix()
        try:
            text = " ".join(file.read_text(encoding="utf-8").split()) if file.is_file() else ""
            recording = Recording.from_file(path, recording_id=id_) if text else None
            expect(recording is None or recording.num_samples > 0, "sound", "samples", "none")
            return recording and corpora._said(recording, text, "unknown", {})
        except Exception as error:  # soundfile's, audioread's and lhotse's own
            raise ValueError(
                f"corpus: {path} cannot be read ({' '.join(str(error).split()):.200}). Mend or remove it."
            ) from None

    names = Counter(path.with_suffix("") for path in sounds)
    twice = [str(name) for name, count in names.items() if count > 1]
    expect(
        not twice,
        "corpus",
        "one sound file of each name",
        f"several of {', '.join(twice[:3])}",
        "Keep one of each.",
    )
    sets, left_out = dict[str, list[Any]](), list[str]()
    with ThreadPoolExecutor(jobs) as pool:
        found = tqdm(
            pool.map(read, sounds), "reading", len(sounds), unit="utt", disable=not progress
        )
        for path, cut in zip(sounds, found, strict=True):
            top = path.relative_to(folder).parts[0]
            part = (
                top if top.partition("-")[0] in corpora.SPLITS and path.parent != folder else "all"
            )
            sets.setdefault(part, []).append(cut) if cut else left_out.append(f"no text of {path}")
    return sets, left_out
