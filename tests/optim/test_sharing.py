"""LAMB's state, shared out over processes by torch."""

import math
from pathlib import Path

import torch
from torch import multiprocessing, nn

from asrkit.optim import Lamb

SETTINGS = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "clip": math.inf,
}


def weights():
    """Three tensors of different sizes, and a gradient for each step."""
    torch.manual_seed(0)
    return nn.ParameterList(
        [torch.randn(5, 3), torch.randn(7), torch.randn(2, 2)]
    ).double()


def trained(model, optimizer):
    """The weights after three steps on gradients that are the same on every process."""
    for step in range(3):
        torch.manual_seed(step)
        for parameter in model:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model])


def rank_of_two(rank, folder):
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,
    )  # warns as it is imported

    store = f"file://{folder}/store"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2
    )
    model = weights()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Lamb, **SETTINGS)
    torch.save(trained(model, optimizer), Path(folder) / f"{rank}.pt")
    held = sum(
        value.numel()
        for state in optimizer.optim.state.values()
        for value in state.values()
    )
    assert (
        held < 2 * 26 + 3
    )  # two moments of 26 weights, and counts: less than all of them
    torch.distributed.destroy_process_group()


def test_zero_redundancy_takes_the_steps_of_one_process_with_less_state(tmp_path):
    model = weights()
    alone = trained(model, Lamb(model.parameters(), **SETTINGS))
    multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        torch.testing.assert_close(
            torch.load(tmp_path / f"{rank}.pt"), alone, rtol=1e-12, atol=0
        )
