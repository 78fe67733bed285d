"""`asrkit data`: prepare corpora, and measure the lengths of their utterances."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, ProgressOptions, finish, print_text, progress
from asrkit.shapes import count, expect
from asrkit.transcribe.options import described


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(ProgressOptions):
    """The options of `asrkit data prepare`."""

    corpus: str = described(
        MISSING,
        "digits or spoken_commands (synthesised here); mini_librispeech or librispeech (from "
        "openslr.org); or a folder, either in LibriSpeech's layout or of sound files with a .txt "
        "file of the same name each",
        flag="",
    )
    out: Path | None = described(
        None,
        "folder for archives and cuts_<part>.jsonl.gz (default: corpora/<name> in "
        "$ASRKIT_HOME or ~/.cache/asrkit)",
        metavar="DIR",
    )
    parts: list[str] = described(
        (),
        "only these parts, or `all` (default: all; for librispeech, with 61 GB in all, only "
        "dev-clean, test-clean and train-clean-100, 7 GB)",
        metavar="PART",
    )
    mirror: str = described(
        "https://www.openslr.org/resources", "site to download archives from", metavar="URL"
    )
    jobs: int = described(
        2, "threads that read files, or processes that synthesise speech", metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class _TargetOptions(ProgressOptions):
    """The options that `data stats` and `data lengths` share."""

    target: str = described(
        MISSING,
        "lhotse cuts, supervisions, recordings or a folder of them; JSON lines with duration "
        "and text; a table of lengths (.csv, .csv.gz); or a table that comes with asrkit: "
        "librispeech_eval, librispeech_train_clean_100, ami_segments",
        flag="",
    )
    tokenizer: str | None = described(
        None,
        "tokenizer that counts tokens: char, or a SentencePiece .model file (default: characters "
        "are counted)",
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class StatsOptions(_TargetOptions):
    """The options of `asrkit data stats`."""

    batch: int = described(
        32, "batch size for which the padding of random batches is computed", metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class LengthsOptions(_TargetOptions):
    """The options of `asrkit data lengths`."""

    out: Path = described(
        MISSING, "a .csv or .csv.gz file with the columns seconds and tokens", metavar="TABLE"
    )


def _prepare(options: PrepareOptions) -> int:
    from asrkit.data.corpora.published import prepare_corpora

    summary = prepare_corpora(
        options.corpus,
        out=options.out,
        parts=options.parts,
        mirror=options.mirror,
        jobs=options.jobs,
        progress=not options.no_progress,
        log=progress,
    )
    print_text(
        options, *(f"{name}: {count(n, 'utterance')}" for name, n in summary["parts"].items())
    )
    total = f"{count(summary['utterances'], 'utterance')}, {summary['hours']:,} hours"
    finish(options, summary, f"{total}: {summary['out']}")
    return 0


def _stats(options: StatsOptions) -> int:
    from asrkit.data.stats import histogram, length_stats, length_table

    lengths = _read_lengths(options)
    stats = length_stats(lengths, batch=options.batch)
    finish(options, stats, f"{length_table(stats)}\n{histogram(lengths.seconds)}")
    return 0


def _lengths(options: LengthsOptions) -> int:
    from asrkit.data.stats import TABLE

    name = str(options.out)
    expect(name.endswith(TABLE), "out", "a name that ends in .csv or .csv.gz", repr(name))
    lengths = _read_lengths(options)
    lengths.save(options.out)
    result = {"out": name, "utterances": len(lengths), "hours": round(lengths.hours, 4)}
    text = f"{count(len(lengths), 'utterance')}, {lengths.hours:,.2f} hours: {name}"
    finish(options, result, text)
    return 0


def _read_lengths(options: _TargetOptions) -> Any:
    from asrkit.data.stats import read_lengths
    from asrkit.text import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    return read_lengths(options.target, tokens=tokenizer, progress=not options.no_progress)


PREPARE = Command(
    name="data prepare",
    summary="Download and unpack a corpus, or read it from a folder; write lhotse cuts.",
    details="Run it again to continue after an interruption.",
    options=PrepareOptions,
    run=_prepare,
    resume="Run the same command again to continue: complete files are kept.",
    examples=["asrkit data prepare mini_librispeech", "asrkit data prepare recordings/"],
)
STATS = Command(
    name="data stats",
    summary="Show the lengths of a corpus: quantiles, hours, padding and a histogram.",
    options=StatsOptions,
    run=_stats,
    examples=[
        "asrkit data stats librispeech_eval",
        "asrkit data stats cuts.jsonl.gz --batch 64",
    ],
)
LENGTHS = Command(
    name="data lengths",
    summary="Write the lengths of a corpus as a table, for `python -m benchmarks batching`.",
    options=LengthsOptions,
    run=_lengths,
    examples=["asrkit data lengths cuts.jsonl.gz --out mine.csv.gz"],
)
