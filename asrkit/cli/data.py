"""`asrkit data`: corpora, and how long their utterances are."""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, count, finish, say
from asrkit.cli.options import add_no_progress


def _prepare(args: argparse.Namespace) -> int:
    from asrkit.data.corpora.published import prepare_corpora

    summary = prepare_corpora(
        args.corpus,
        out=args.out,
        parts=args.parts,
        mirror=args.mirror,
        jobs=args.jobs,
        progress=not args.no_progress,
        say=functools.partial(print, file=sys.stderr),
    )
    for part, number in summary["parts"].items():
        say(args, f"{part}: {count(number, 'utterance')}")
    total = f"{count(summary['utterances'], 'utterance')}, {summary['hours']:,} hours"
    finish(args, summary, f"{total}: {summary['out']}")
    return 0


def _lengths(args: argparse.Namespace) -> int:
    from asrkit.data.batching.statistics import TABLE
    from asrkit.shapes import expect

    name = str(args.out)
    expect(name.endswith(TABLE), "out", "a name that ends in .csv or .csv.gz", repr(name))
    lengths = _read_lengths(args)
    lengths.save(args.out)
    result = {
        "out": name,
        "utterances": len(lengths),
        "hours": round(lengths.hours, 4),
        "tokens": int(lengths.tokens.sum()),
    }
    finish(args, result, f"{count(len(lengths), 'utterance')}, {lengths.hours:,.2f} hours: {name}")
    return 0


def _stats(args: argparse.Namespace) -> int:
    from asrkit.data.batching.statistics import histogram, length_stats, length_table
    from asrkit.shapes import expect

    expect(
        args.out is None or args.out.suffix in (".png", ".svg", ".pdf"),
        "out",
        "a name that ends in .png, .svg or .pdf",
        repr(str(args.out)),
    )
    lengths = _read_lengths(args)
    stats = length_stats(lengths, batch=args.batch)
    if args.out:
        _draw(lengths, args.target, args.out)
    lines = [length_table(stats), histogram(lengths.seconds)]
    if args.out:
        lines.append(f"picture: {args.out}")
    finish(args, stats, "\n".join(lines))
    return 0


def _draw(lengths: Any, target: str, path: Path) -> None:
    """Write a picture of the lengths: of seconds, and where they are known of tokens and rates."""
    from asrkit.files import atomic

    try:
        from asrkit.workbench import plots
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise RuntimeError(
            f'out: a picture needs {missing}. Run pip install "asrkit[notebooks]", '
            'or -e ".[notebooks]" in a checkout.'
        ) from None
    title = f"{target}: {len(lengths):,} utterances, {lengths.hours:,.1f} hours"
    figure: Any
    axes: Any
    if lengths.tokens.any():
        figure, axes = plots.canvas(title, columns=3, size=(11, 3.3))
    else:
        figure, ax = plots.canvas(title, columns=1, size=(5, 3.3))
        axes = [ax]
    plots.lengths(lengths.seconds, lengths.tokens, axes)
    with atomic(path) as part:
        figure.savefig(part, dpi=110)


def _read_lengths(args: argparse.Namespace) -> Any:
    from asrkit.data.batching.statistics import read_lengths
    from asrkit.text import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    return read_lengths(args.target, tokens=tokenizer, progress=not args.no_progress)


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "corpus",
        help="digits or spoken_commands (synthesised here); mini_librispeech or librispeech (from "
        "openslr.org); or a folder in LibriSpeech's layout, or of sound files each with a .txt "
        "beside it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for archives and cuts_<part>.jsonl.gz (default: corpora/<name> in "
        "$ASRKIT_HOME or ~/.cache/asrkit)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=[],
        metavar="PART",
        help="only these parts, or `all` (default: all; of librispeech's 61 GB only dev-clean, "
        "test-clean and train-clean-100, 7 GB)",
    )
    parser.add_argument(
        "--mirror",
        default="https://www.openslr.org/resources",
        metavar="URL",
        help="where to download archives from",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        metavar="N",
        help="threads that read files, or processes that synthesise speech",
    )
    add_no_progress(parser)


def _add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """What `data stats` and `data lengths` read."""
    parser.add_argument(
        "target",
        help="lhotse cuts, supervisions, recordings or a folder of them; JSON lines with duration "
        "and text; a table of lengths (.csv, .csv.gz); or a table that comes with asrkit: "
        "librispeech_eval, librispeech_train_clean_100, ami_segments",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="char, or a SentencePiece .model file: what counts as a token (default: characters)",
    )
    add_no_progress(parser)


def _add_stats_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target_arguments(parser)
    parser.add_argument(
        "--out", type=Path, metavar="PICTURE", help="also draw them: a .png, .svg or .pdf file"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        metavar="N",
        help="batch size for which the padding of random batches is computed",
    )


def _add_lengths_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target_arguments(parser)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="TABLE",
        help="a .csv or .csv.gz file with the columns seconds and tokens",
    )


PREPARE = Command(
    name="data prepare",
    summary="Download and unpack a corpus, or find it in a folder; write lhotse cuts.",
    details="Run it again to continue after an interruption.",
    run=_prepare,
    add_arguments=_add_prepare_arguments,
    examples=["asrkit data prepare mini_librispeech", "asrkit data prepare recordings/"],
)
STATS = Command(
    name="data stats",
    summary="Show the lengths of a corpus: quantiles, hours, padding, a histogram.",
    run=_stats,
    add_arguments=_add_stats_arguments,
    examples=[
        "asrkit data stats librispeech_eval",
        "asrkit data stats librispeech_eval --batch 64",
        "asrkit data stats cuts.jsonl.gz --out lengths.png",
    ],
)
LENGTHS = Command(
    name="data lengths",
    summary="Write the lengths of a corpus as a table, for `bench batching --lengths`.",
    run=_lengths,
    add_arguments=_add_lengths_arguments,
    examples=["asrkit data lengths cuts.jsonl.gz --out mine.csv.gz"],
)
