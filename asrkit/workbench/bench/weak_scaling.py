"""Utterances a second of a Jasper's training on several processes, each with a batch of its own.

Here on one and two processes of this machine, on loopback alone: `weak_scaling`. On eight GPUs, and
on one to compare with, as the published tables have it:

    torchrun --standalone --nproc-per-node 8 -m asrkit.workbench.bench.weak_scaling \\
        --preset jasper_10x5dr --batch 64 --frames 1670 --precision mixed --device cuda
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asrkit.models import CTCModel, JasperConfig, presets
from asrkit.runtime import usable_cores
from asrkit.shapes import expect, whole
from asrkit.workbench.bench.gang import run_ranks
from asrkit.workbench.bench.jasper_claims import TrainingStep
from asrkit.workbench.bench.protocols import training_throughput

if TYPE_CHECKING:  # training needs packages that a bare GPU machine lacks
    from asrkit.training.processes import Processes

MODULE = "asrkit.workbench.bench.weak_scaling"
AGREEMENTS = 200  # of which the median is taken


def weak_scaling(
    ranks: Sequence[int] = (1, 2),
    *,
    preset: str = "mini_jasper",
    batch: int = 8,
    frames: int = 400,
    steps: int = 5,
) -> dict[int, dict[str, Any]]:
    """Training by some numbers of processes on this machine's cores, one thread each.

    Args:
        ranks: Numbers of processes, one run after the other.
        preset: Of a Jasper.
        batch: Utterances of a step of each process.
        frames: Feature frames of each utterance.
        steps: Of an epoch; the last of two counts.

    Returns:
        For each number "utterances_per_s" of all processes together, which divided by that of one
        and by the processes is the efficiency of weak scaling; "agree_ms", the time that the
        processes take to agree on a step's numbers; and the settings.

    Raises:
        ValueError: More processes than cores.
        RuntimeError: A process failed, and the others were ended; the message is one line, with
            the last that it said.
    """
    cores = usable_cores()
    for count in ranks:
        expect(whole(count, 1, cores), "ranks", f"from 1 to the {cores} cores here", count)
    arguments = ["--preset", preset, "--batch", str(batch), "--frames", str(frames)]
    arguments += ["--steps", str(steps), "--threads", "1"]
    return {count: run_ranks(MODULE, count, arguments) for count in ranks}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Two epochs as one of the processes; what rank 0 prints.

    Args:
        args: Of the command line.
    """
    from asrkit.training.processes import joined

    if args.threads:
        torch.set_num_threads(args.threads)
    config = presets.PRESETS[args.preset]()
    jasper = isinstance(config.encoder, JasperConfig)
    expect(jasper, "preset", "one of a Jasper", repr(args.preset))
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = CTCModel(config).to(device)  # type: ignore[arg-type]
    with joined(device) as processes:
        step = TrainingStep(model, args.batch, args.frames, args.precision)
        if processes.grouped:
            step.model = _in_parallel(step.model, device)
        epoch = partial(_epoch, step, args.steps, processes.wait)
        rate = training_throughput(epoch, device=device)
        (total,) = processes.total([rate])
        agree_ms = _agree_ms(processes)
    return {
        "preset": args.preset,
        "processes": processes.count,
        "batch": args.batch,
        "frames": args.frames,
        "precision": args.precision,
        "device": args.device,
        "utterances_per_s": total,
        "agree_ms": agree_ms,
    }


def _agree_ms(processes: "Processes") -> float:
    """Milliseconds of one exchange of the numbers that processes agree on before a step."""
    from asrkit.training.state import Exchanged

    numbers = [1.0] * len(Exchanged._fields)
    times_ms = []
    for _ in range(AGREEMENTS):
        begun = time.perf_counter()
        processes.total(numbers)
        times_ms.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times_ms)


def _in_parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with gradients averaged over the processes."""
    if device.type == "cuda":
        return DistributedDataParallel(model, device_ids=[device])
    return DistributedDataParallel(model)


def _epoch(step: TrainingStep, steps: int, wait: Callable[[], object]) -> int:
    """All processes begin together and end when the last has; returns this one's utterances."""
    wait()
    for _ in range(steps):
        step().item()  # waited for, as in the published training
    wait()
    return steps * step.B


def main() -> None:
    """One process of a run; rank 0 prints a line of JSON."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--preset", default="mini_jasper")
    parser.add_argument("--batch", type=int, default=8, help="utterances of each process")
    parser.add_argument("--frames", type=int, default=400, help="of each utterance")
    parser.add_argument("--steps", type=int, default=5, help="of an epoch; two are trained")
    parser.add_argument("--precision", choices=("tf32", "mixed"), default="tf32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0: torch's own")
    torch.backends.cudnn.benchmark = True  # as the published training
    result = train(parser.parse_args())
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))


if __name__ == "__main__":
    main()
