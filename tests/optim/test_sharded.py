"""Sharded LAMB equals plain LAMB: one process with every cut, and four processes that check the rest."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asrkit.optim import Lamb, ShardedLamb
from asrkit.optim.layout import Layout

sys.path.insert(0, str(Path(__file__).parent))
from ranks import RANKS, work

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-9, "weight_decay": 1e-2}


@pytest.mark.parametrize("sizes", [[1], [10], [3, 0, 5], [1, 1, 1], [100, 1, 37]])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("bucket", [1, 8, 1000])
def test_every_element_lies_on_one_rank(sizes, ranks, bucket):
    layout = Layout(sizes, ranks, bucket)
    for before, after in pairwise(layout.buckets):
        assert before.first + before.length == after.first
    elements = [(index, i) for index, size in enumerate(sizes) for i in range(size)]
    held = []
    for rank in range(ranks):
        places = []
        for piece in layout.shard_pieces(rank):
            held += [(piece.parameter, i) for i in range(piece.start, piece.stop)]
            places += range(piece.offset, piece.offset + piece.length)
        assert len(places) == len(set(places))
        assert max(places, default=0) < layout.shard_length()
    assert sorted(held) == elements
    in_buckets = []
    for bucket_of_vector in layout.buckets:
        assert bucket_of_vector.length % ranks == 0
        for piece in layout.bucket_pieces(bucket_of_vector):
            in_buckets += [(piece.parameter, i) for i in range(piece.start, piece.stop)]
    assert in_buckets == elements


@pytest.fixture
def one_rank():
    """A process group of this process alone, without a socket."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("impl", ["reference", "foreach", "numba_cpu"])
@pytest.mark.filterwarnings("ignore:.*reduce_scatter.*:UserWarning")
def test_a_parameter_in_several_pieces_on_one_rank_has_the_norm_of_all(one_rank, impl):
    torch.manual_seed(0)
    first = torch.randn(50) * torch.logspace(-2, 2, 50)  # pieces of unlike norms
    runs = []
    for make in (Lamb, ShardedLamb):
        parameters = [nn.Parameter(first.clone()), nn.Parameter(torch.ones(3))]
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
        options = {"bucket": 8} if make is ShardedLamb else {}
        runs.append((parameters, make(groups, 0.1, impl=impl, **options, **SETTINGS)))
    assert len([piece for piece in runs[1][1].pieces if piece.parameter == 0]) == 7
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(50, generator=generator), torch.randn(3, generator=generator)]
        for parameters, optimizer in runs:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    for got, wanted in zip(runs[1][0], runs[0][0], strict=True):
        assert (got - wanted).norm() < 1e-6 * wanted.norm()


def test_groups_cannot_be_added_later_and_strided_parameters_be_cut_up(one_rank):
    optimizer = ShardedLamb([nn.Parameter(torch.ones(3))], 0.1, **SETTINGS)
    with pytest.raises(ValueError, match="param_group: expected no group once"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(
        ValueError, match="params: expected contiguous parameters, got parameter 0 of"
    ):
        ShardedLamb([nn.Parameter(torch.ones(3, 2).T)], 0.1, impl="foreach", **SETTINGS)
    with pytest.raises(ValueError, match="bucket: expected a whole number of elements"):
        ShardedLamb([nn.Parameter(torch.ones(3))], 0.1, bucket=0, **SETTINGS)


def test_a_shard_of_a_state_is_refused(one_rank):
    parameter = nn.Parameter(torch.ones(6))
    optimizer = ShardedLamb([parameter], 0.1, **SETTINGS)
    parameter.grad = torch.ones(6)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = saved["state"][0] | {"exp_avg": torch.ones(3)}
    said = (
        "exp_avg of shape \\(6,\\) for parameter 0, got \\(3,\\). A shard of a state does not fit"
    )
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)


def test_without_a_process_group_the_way_out_is_named():
    with pytest.raises(
        ValueError, match="group: expected a process group.* one process needs Lamb"
    ):
        ShardedLamb([nn.Parameter(torch.ones(3))], 0.1, **SETTINGS)


@pytest.fixture(scope="module")
def found(tmp_path_factory, start_method):
    """What four processes found, by rank; `ranks.py` has the checks."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(work, (folder,), nprocs=RANKS, start_method=start_method)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", [
    "two", "four", "two_by_two", "restarted_on_four", "restarted_in_one",
    "fsdp_two", "fsdp_two_by_two", "fsdp_two_average", "fsdp_two_by_two_average",
    "novograd_two", "novograd_two_by_two",
])  # fmt: skip
def test_many_processes_equal_one_with_the_global_batch(found, name):
    assert max(of_rank[name] for of_rank in found) < 1e-6


@pytest.mark.parametrize("name", ["four_state", "two_by_two_state", "restarted_state"])
def test_the_gathered_state_is_that_of_one_process(found, name):
    # an average of gradients that cancel keeps fewer digits than the weights
    assert max(of_rank[name] for of_rank in found) < 1e-5


def test_each_rank_holds_its_share_of_the_state(found):
    elements = 40 * 9 + 1 + 7 + 33 * 5 + 1 + 3
    for of_rank in found:
        assert elements / 4 <= of_rank["four_held"] <= elements / 4 + 1
        assert elements / 2 <= of_rank["two_by_two_held"] <= elements / 2 + 1


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(found):
    for name in ("skipped", "novograd_two_skipped", "novograd_two_by_two_skipped"):
        assert [of_rank[name] for of_rank in found] == [0.0] * RANKS


def test_ranks_with_another_order_of_equal_shapes_are_named_on_all_ranks(found):
    for of_rank in found:
        assert of_rank["order"].startswith(
            "params: expected parameter 0 (first) of shape (3,), checksum"
        )
        assert "as on rank 0, got parameter 0 (second) of shape (3,), checksum" in of_rank["order"]
        assert "on rank 2. Build the model alike on all ranks" in of_rank["order"]


def test_dtensors_where_they_do_not_belong_are_named(found):
    for of_rank in found:
        assert of_rank["mixed"].startswith("params: expected all DTensors, or none, got 4 of 5.")
        assert (
            of_rank["dtensors"]
            == "params: expected whole parameters, got DTensors. Lamb takes the DTensors of FSDP2."
        )
        assert of_rank["parts"].startswith(
            "state_dict: expected whole tensors, got DTensors of parameter 0. Save it by"
        )


def test_local_parts_on_a_cpu_take_the_compiled_path(found):
    assert {of_rank["fsdp_two_impl"] for of_rank in found} == {"numba_cpu"}
