"""`asrkit data`: corpora and how long their utterances are."""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from asrkit.cli.options import QUIET, Commands


def _data_prepare(args: argparse.Namespace) -> int:
    from asrkit.data.corpora.published import prepare_corpora

    how: dict[str, Any] = {
        "out": args.out,
        "parts": args.parts,
        "mirror": args.mirror,
        "jobs": args.jobs,
    }
    summary = prepare_corpora(
        args.corpus,
        **how,
        progress=not args.no_progress,
        say=functools.partial(print, file=sys.stderr),
    )
    print(json.dumps(summary))
    return 0


def _data_lengths(args: argparse.Namespace) -> int:
    from asrkit.data.batching.statistics import TABLE
    from asrkit.shapes import expect

    expect(
        str(args.out).endswith(TABLE),
        "out",
        "a name that ends in .csv or .csv.gz",
        repr(str(args.out)),
    )
    lengths = _lengths(args)
    lengths.save(args.out)
    hours, tokens = round(lengths.hours, 4), int(lengths.tokens.sum())
    print(
        json.dumps(
            {"out": str(args.out), "utterances": len(lengths), "hours": hours, "tokens": tokens}
        )
    )
    return 0


def _data_stats(args: argparse.Namespace) -> int:
    from asrkit.data.batching.statistics import histogram, length_stats, length_table
    from asrkit.files import atomic
    from asrkit.shapes import expect

    picture = args.out is None or args.out.suffix in (".png", ".svg", ".pdf")
    expect(picture, "out", "a name that ends in .png, .svg or .pdf", repr(str(args.out)))
    lengths = _lengths(args)
    stats = length_stats(lengths, batch=args.batch)
    if args.out:
        try:
            from asrkit.workbench import plots
        except ModuleNotFoundError as error:
            raise RuntimeError(
                f'out: a picture needs {error.name}. Run pip install -e ".[notebooks]" in the checkout.'
            ) from None
        known = bool(stats["tokens"])
        title = f"{args.target}: {len(lengths):,} utterances, {lengths.hours:,.1f} hours"
        figure, axes = plots.canvas(
            title, columns=3 if known else 1, size=(11, 3.3) if known else (5, 3.3)
        )
        plots.lengths(lengths.seconds, lengths.tokens, axes if known else [axes])  # type: ignore[arg-type, list-item]
        with atomic(args.out) as part:
            figure.savefig(part, dpi=110)
    if not args.json:
        print(length_table(stats), histogram(lengths.seconds), sep="\n")
    print(json.dumps(stats))
    return 0


def _lengths(args: argparse.Namespace) -> Any:
    from asrkit.data.batching.statistics import read_lengths
    from asrkit.text import load_tokenizer

    tokens = load_tokenizer(args.tokenizer) if args.tokenizer else None
    return read_lengths(args.target, tokens=tokens, progress=not args.no_progress)


# fmt: off
TARGET = ("target", {"help": "lhotse cuts, supervisions, recordings or a folder of them; JSON lines with duration and text; a "
                     "table (.csv, .csv.gz), or one that asrkit has: librispeech_eval, librispeech_train_clean_100, ami_segments"})
TOKENS = ("--tokenizer", {"help": "char, or a SentencePiece .model file: what tokens are (none: characters)"})
COMMANDS: Commands = {
    "data prepare": (_data_prepare, "Make a corpus ready: load, check and unpack it, or find it in a folder; write lhotse cuts.", [
        ("corpus", {"help": "digits or spoken_commands (synthesised here); yesno, mini_librispeech, librispeech (openslr.org); or "
                    "a folder of LibriSpeech's layout, of lhotse recordings and supervisions, or of sound files each with a .txt"}),
        ("--out", {"type": Path, "metavar": "DIR", "help": "folder for archives and cuts_<part>.jsonl.gz (none: corpora/<name> in "
                   "$ASRKIT_HOME or ~/.cache/asrkit)"}),
        ("--parts", {"nargs": "+", "default": [], "metavar": "PART", "help": "only these, or all (none: all, but of "
                     "librispeech's 61 GB dev-clean test-clean train-clean-100, 7 GB)"}),
        ("--mirror", {"default": "https://www.openslr.org/resources", "metavar": "URL", "help": "where archives come from"}),
        ("--jobs", {"type": int, "default": 2, "help": "threads that read, or processes that speak"}), QUIET]),
    "data stats": (_data_stats, "Lengths of a corpus: quantiles, hours, padding of random batches, a histogram in the terminal.", [
        TARGET, ("--out", {"type": Path, "metavar": "PICTURE", "help": "also draw them: .png, .svg or .pdf"}),
        ("--json", {"action": "store_true", "help": "only the line of JSON"}),
        ("--batch", {"type": int, "default": 32, "help": "utterances of the random batches whose padding is told"}),
        TOKENS, QUIET]),
    "data lengths": (_data_lengths, "Write the table of lengths of a manifest, which `bench batching --lengths` takes.", [
        TARGET, ("--out", {"type": Path, "required": True, "metavar": "TABLE", "help": "a .csv or .csv.gz file: seconds,tokens"}),
        TOKENS, QUIET]),
}
# fmt: on
