"""`asrkit scale`."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from asrkit.cli.command import Command, count, finish, table_width

DEFAULT_WORKERS = {"p4de.24xlarge": (1, 8, 64), "c7a.48xlarge": (1000,)}  # without --instance
FLEETS = (1, 8, 64)  # workers of any other machine
UNITS = {"gpu": "GPU", "core": "core"}
DEVICES = {"gpu": "cuda", "core": "cpu"}
ORDERS = {"parts": "fixed parts (--part K/N)", "queue": "one queue of shards"}
HEADS = ["workers", "days", "USD", "shards", "failures", "lost", "waiting", "MB/s", "readers"]
LEGEND = (
    "lost: share of the paid time that failures cost; waiting: share of it in which workers have",
    "nothing left and the last one works; MB/s: what the storage has to give, and readers: how",
    "many threads have to read, for all workers to hear as fast as they can",
)


def _scale(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench.cost import stored_audio

    _check_combinations(args)
    kinds = stored_audio()
    expect(args.audio in kinds, "audio", "one of " + ", ".join(kinds), repr(args.audio))
    stored = kinds[args.audio]
    rows = [_row(args, stored, *fleet) for fleet in _fleets(args)]
    result = {
        "hours": args.hours,
        "audio": args.audio,
        "order": args.order,
        "spread": args.spread,
        "failure_h": args.failure_h,
        "startup_s": args.startup_s,
        "rows": rows,
    }
    finish(args, result, "\n".join(_text(args, rows, stored)))
    return 0


def _check_combinations(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, or would have no effect."""
    from asrkit.shapes import expect

    for name in ("per", "price"):
        value = getattr(args, name)
        expect(value is None or args.rtfx is not None, name, "--rtfx beside it", value)
    for name in ("instance", "model"):
        value = getattr(args, name)
        expect(value is None or args.rtfx is None, name, "none beside --rtfx", value)
    readers, rate = args.readers, args.storage_rate
    expect(readers is None or readers > 0, "readers", "at least 1", readers)
    expect(rate is None or rate > 0, "storage_rate", "above 0", rate)


def _fleets(args: argparse.Namespace) -> list[tuple[int, Any, Any]]:
    """(workers, RTFx of one, the machine whose units they are) of each row."""
    if args.rtfx is not None:
        speed, own = _own(args)
        return [(number, speed, own) for number in args.workers or FLEETS]
    machines = DEFAULT_WORKERS
    if args.instance is not None:
        machines = {args.instance: FLEETS}
    fleets = []
    for name, numbers in machines.items():
        speed, instance = _rented(args, name)
        fleets += [(number, speed, instance) for number in args.workers or numbers]
    return fleets


def _own(args: argparse.Namespace) -> tuple[Any, Any]:
    """The RTFx and the machine that --rtfx, --per and --price describe."""
    from asrkit.workbench.cost import Instance, Range, Speed

    per = args.per or "gpu"
    rtfx = Range.parse(args.rtfx, "rtfx", single=True)
    price = Range.parse(args.price or "1", "price", single=True)  # not shown where it is not given
    own = Instance(name="own", usd_per_hour=price, gpus=1, cores=1)
    return Speed(rtfx=rtfx, per=per, origin="assumed"), own


def _rented(args: argparse.Namespace, name: str) -> tuple[Any, Any]:
    """The highest published RTFx of one unit of an instance, and the instance."""
    from asrkit.shapes import expect
    from asrkit.workbench import cost

    prices = cost.load_prices()
    expect(name in prices, "instance", "one of " + ", ".join(prices), repr(name))
    instance = prices[name]
    model = args.model or cost.DEFAULT_MODEL
    fitting = cost.speeds_for(instance, cost.published_speeds(), model=model)
    if args.model is not None:
        fitting = [speed for speed in fitting if speed.model == args.model]
    wanted = f"one with a published RTFx of {model}"
    expect(bool(fitting), "instance", wanted, name, "Pass --rtfx, --per and --price.")
    return max(fitting, key=lambda speed: speed.rtfx.middle), instance


def _row(
    args: argparse.Namespace, stored: Any, workers: int, speed: Any, instance: Any
) -> dict[str, Any]:
    """What the hours take on so many workers."""
    from asrkit.transcribe.bulk.planning import usual_shard_h
    from asrkit.workbench.cost import Fleet, equal_shards, simulate, transcription_cost

    shard_h = args.shard_h
    if shard_h is None:
        shard_h = usual_shard_h(args.hours * 3600, DEVICES[speed.per])
    rtfx = speed.rtfx.middle
    fleet = Fleet(
        workers=workers,
        rtfx=rtfx,
        spread=args.spread,
        startup_s=args.startup_s,
        failure_h=args.failure_h,
        reading_rtfx=inf if args.readers is None else args.readers * stored.thread_rtfx,
        storage_rtfx=_storage_rtfx(args, stored),
        order=args.order,
        seed=args.seed,
    )
    shards = equal_shards(args.hours, shard_h)
    outcome = simulate(shards, fleet)
    terms = {"hours": args.hours, "utilisation": outcome.utilisation}
    usd = transcription_cost(instance, speed, **terms).usd.middle
    free = args.rtfx is not None and args.price is None
    return {
        "workers": workers,
        "per": speed.per,
        "rtfx": rtfx,
        "rtfx_is": ", ".join(filter(None, [speed.label, speed.model])),
        "source": speed.source,
        "instance": instance.name,
        "days": outcome.days,
        "usd": None if free else usd,
        "shards": len(shards),
        "shard_h": shard_h,
        "failures": outcome.failures,
        "lost": outcome.lost,
        "waiting": outcome.idle,
        "storage_MB_per_s": stored.storage_MB_per_s(workers * rtfx),
        "readers": workers * stored.threads(rtfx),
    }


def _storage_rtfx(args: argparse.Namespace, stored: Any) -> float:
    """Seconds of audio that --storage-rate gives in a second."""
    if args.storage_rate is None:
        return inf
    return args.storage_rate / stored.storage_MB_per_s(1.0)


def _text(
    args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], stored: Any
) -> Iterator[str]:
    """The result as lines of text."""
    from asrkit.workbench.tables import aligned

    yield f"{args.hours:,.10g} hours of speech in {args.audio}, by {ORDERS[args.order]}"
    yield ""
    table = [HEADS, *map(_cells, rows)]
    yield from aligned(table, right=range(1, len(HEADS)), width=table_width())
    yield ""
    yield from LEGEND
    yield ""
    yield from _sources(rows)
    yield f"{args.audio}: {stored.note}; a thread reads {stored.thread_rtfx:,.10g} times as fast"
    yield f"as it is spoken, measured on a core of {stored.device}"
    yield (
        f"assumed: rates of workers differ by {args.spread:.4g} of their mean; a worker fails every"
    )
    yield (
        f"{args.failure_h:,.10g} hours, loses the shard at hand and starts again in "
        f"{args.startup_s:,.10g} s; each is paid until the"
    )
    yield "last shard is done; a part of a machine costs its share"


def _cells(row: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    from asrkit.workbench.tables import percent

    usd = "–"
    if row["usd"] is not None:
        usd = f"{row['usd']:,.0f}"
    return [
        count(row["workers"], UNITS[row["per"]]),
        f"{row['days']:,.3g}",
        usd,
        f"{row['shards']:,} x {row['shard_h']:.3g} h",
        f"{row['failures']:,}",
        percent(row["lost"], 2),
        percent(row["waiting"], 1),
        f"{row['storage_MB_per_s']:,.0f}",
        f"{row['readers']:,}",
    ]


def _sources(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where each RTFx is from."""
    told = set()
    for row in rows:
        unit = UNITS[row["per"]]
        line = f"RTFx of a {unit}: {row['rtfx']:,.10g}, {row['rtfx_is']}"
        if line not in told:
            told.add(line)
            yield line
            if row["source"]:
                yield f"  {row['source']}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hours", type=float, default=1e6, metavar="N", help="hours of speech to transcribe"
    )
    _add_worker_arguments(parser)
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--shard-hours",
        type=float,
        dest="shard_h",
        metavar="HOURS",
        help="audio in a shard (default: what asrkit transcribe --shards takes)",
    )
    plan.add_argument(
        "--order",
        choices=[*ORDERS],
        default="parts",
        help="parts: each worker has every N-th shard, as with --part K/N; queue: whoever is free "
        "takes the next one",
    )
    _add_assumptions(parser)
    _add_reading_arguments(parser)


def _add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    workers = parser.add_argument_group("workers: a process with a GPU or a core of its own")
    workers.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help="how many, a row each (default: 1, 8 and 64 GPUs; 1,000 cores)",
    )
    workers.add_argument(
        "--instance",
        metavar="NAME",
        help="the machine whose cores or GPUs they are, of data/prices.csv (default: "
        + " and ".join(DEFAULT_WORKERS)
        + ")",
    )
    workers.add_argument(
        "--model",
        metavar="NAME",
        help="whose RTFx, of those published (default: parakeet_rnnt_1_1b, or where it has none "
        "any other)",
    )
    workers.add_argument("--rtfx", metavar="N", help="your own RTFx, of one worker")
    workers.add_argument("--per", choices=[*UNITS], help="what --rtfx is of (default: gpu)")
    workers.add_argument("--price", metavar="USD", help="of an hour of one worker; needs --rtfx")


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    assumed = parser.add_argument_group("assumptions")
    assumed.add_argument(
        "--spread",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="standard deviation of the RTFx between workers, as a share of its mean",
    )
    assumed.add_argument(
        "--failure-hours",
        type=float,
        default=1000.0,
        dest="failure_h",
        metavar="HOURS",
        help="mean time between two failures of one worker; about 24 for machines that are taken "
        "back now and then, inf for none",
    )
    assumed.add_argument(
        "--startup",
        type=float,
        default=60.0,
        dest="startup_s",
        metavar="SECONDS",
        help="until a process hears, at the beginning and after a failure",
    )
    assumed.add_argument("--seed", type=int, default=0, help="of rates and failures")


def _add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--audio",
        default="mp3",
        metavar="FORMAT",
        help="how the speech is stored: mp3, opus, flac or wav, of data/audio_formats.csv",
    )
    reading.add_argument(
        "--readers",
        type=int,
        metavar="N",
        help="reading threads of a worker, where they may be too few (default: enough)",
    )
    reading.add_argument(
        "--storage-rate",
        type=float,
        metavar="MB",
        help="MB that the storage gives in a second, to all workers together (default: enough)",
    )


COMMAND = Command(
    name="scale",
    summary="Compute how long a bulk transcription takes on many GPUs or cores, with failures.",
    details="The shards of a plan are simulated one by one, with workers of unequal speed that "
    "fail now and then. RTFx of GPUs and cores are published ones, with their source, or yours.",
    run=_scale,
    add_arguments=_add_arguments,
    examples=[
        "asrkit scale",
        "asrkit scale --order queue --failure-hours 24",
        "asrkit scale --instance p5en.48xlarge --model parakeet_tdt_0_6b_v3 --workers 8 16",
        "asrkit scale --hours 20000 --workers 4 --rtfx 1500 --price 2.5 --readers 2",
    ],
)
