"""One step of optimizers on two processes: with the whole state on each, and with a part of it.

Each process has gradients of its own, whose mean is part of the step.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asrkit.optim import Lamb, ShardedLamb
from asrkit.workbench.bench.gang import run_ranks
from asrkit.workbench.bench.suites.optimizers import PUBLISHED, ROUND, SMALL, weights

if TYPE_CHECKING:  # training needs packages that a bare GPU machine lacks
    from asrkit.training.processes import Processes

MODULE = "asrkit.workbench.bench.sharded_steps"
BUCKET_B = 25 << 20  # of a sum of gradients, as DDP has it


@dataclass(frozen=True)
class Arm:
    """An optimizer of this process.

    Args:
        step: From this process's gradients to the new weights.
        state_B: Of the state that this process holds, once a step was made.
    """

    step: Callable[[], Any]
    state_B: Callable[[], int]


def sharded_steps(rounds: int, *, small: bool = False) -> dict[str, dict[str, Any]]:
    """Times of a step of each optimizer on two processes of this machine, interleaved.

    Args:
        rounds: Steps of each that count.
        small: Of a small model, not of MLPerf's RNN-T.

    Returns:
        For each optimizer "samples_ms" and "state_B" of rank 0.

    Raises:
        RuntimeError: A process failed.
    """
    arguments = ["--rounds", str(rounds)]
    if small:
        arguments.append("--small")
    return run_ranks(MODULE, 2, arguments)


def arms(parameters: list[nn.Parameter]) -> dict[str, Arm]:
    """Optimizers of torch and of asrkit, the state whole and shared out.

    Args:
        parameters: With gradients; they do not change, as the rate is 0.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    lamb = Lamb(parameters, 0.0, **PUBLISHED)
    sharded = ShardedLamb(parameters, 0.0, **PUBLISHED)
    adamw = torch.optim.AdamW(parameters, lr=0.0, fused=True)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.0, fused=True)

    def after_mean(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            average_gradients(parameters)
            optimizer.step()

        return step

    return {
        "lamb": Arm(after_mean(lamb), lambda: _bytes(lamb.state)),
        "sharded_lamb": Arm(sharded.step, lambda: 2 * sharded.exp_avg.nbytes),
        "adamw_fused": Arm(after_mean(adamw), lambda: _bytes(adamw.state)),
        "zero_adamw_fused": Arm(after_mean(zero), lambda: _bytes(zero.optim.state)),
    }


def _bytes(state: Mapping[Any, Mapping[str, Any]]) -> int:
    """Of the tensors of an optimizer's state."""
    values = [value for of_parameter in state.values() for value in of_parameter.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Replace gradients by their mean over the processes, bucket by bucket as DDP does."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None
        bucket.append(parameter.grad)
        if sum(gradient.nbytes for gradient in bucket) >= BUCKET_B:
            _average(bucket)
            bucket = []
    if bucket:
        _average(bucket)


def _average(gradients: list[Tensor]) -> None:
    """Replace tensors by their mean over the processes, with one sum."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def measure(rounds: int, widths: Any, processes: "Processes") -> dict[str, dict[str, Any]]:
    """What this process measures; the processes begin each step together.

    Args:
        rounds: Steps of each optimizer that count, after one that does not.
        widths: Sizes of the model.
        processes: Of this run.
    """
    found: dict[str, dict[str, Any]] = {}
    optimizers = arms(weights(widths, "cpu"))
    for number in range(rounds + 1):
        for name, arm in optimizers.items():
            processes.wait()
            begun = time.perf_counter()
            arm.step()
            processes.wait()
            taken_ms = 1e3 * (time.perf_counter() - begun)
            if number == 0:
                found[name] = {"samples_ms": [], "state_B": arm.state_B()}
            else:
                found[name]["samples_ms"].append(taken_ms)
    return found


def main() -> None:
    """One process of a run; rank 0 prints a line of JSON."""
    from asrkit.training.processes import joined

    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a small model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    widths = ROUND
    if args.small:
        widths = SMALL
    with joined(torch.device("cpu")) as processes:
        found = measure(args.rounds, widths, processes)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main()
