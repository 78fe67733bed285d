"""Rates of cores: what is done, and how often."""

import torch

from asrkit.workbench.lessons.cost.cores import core_rates, usable_cores


def test_one_core_and_all_cores_work_in_turns():
    done = []
    cores = usable_cores(2)
    threads = torch.get_num_threads()

    def work():
        done.append(sum(range(20_000)))

    found = core_rates(work, 3.0, cores=cores, repeats=2)
    assert len(found) == 2 and all(rate > 0 for rates in found for rate in rates)
    assert len(done) == len(cores) + 2 * (1 + len(cores))
    assert torch.get_num_threads() == threads


def test_no_more_cores_are_used_than_asked_for():
    assert len(usable_cores(1)) == 1
