"""LAMB whose state is shared out among ranks: each updates its part of the weights.

A step: the gradient of a bucket is summed and cut up (reduce-scatter), and the parts are summed
over groups (all-reduce); each rank updates its part, with norms of whole parameters; the new
weights are gathered. So a rank holds 1 / ranks of both moving averages and of the reduced gradient.

Source: NVIDIA's apex, distributed_fused_lamb.py, in MLPerf training 1.0: shards in groups of 8 GPUs
that an NVLink joins, all-reduce across the groups.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asrkit.optim.lamb import Lamb, check_local_state, settings_of
from asrkit.optim.layout import Bucket, Layout, Piece
from asrkit.optim.norms import ShardNorms, is_dtensor
from asrkit.optim.step import Group, Tensors, lamb_step
from asrkit.shapes import expect, whole

BUCKET = 1 << 24  # elements: 64 MiB in float32


class ShardedLamb(Lamb):
    """LAMB on parameters that every rank holds, with its state shared out among ranks.

    Gradients are averaged over all ranks here: the model is not wrapped in DDP. A parameter without
    a gradient on some ranks has a gradient of 0 there; one without a gradient on all ranks stays.

    Args:
        params: as of `Lamb`; contiguous, the same on all ranks.
        lr: as of `Lamb`.
        group: process group whose ranks share the state; None for all ranks.
        across: process group of the ranks that hold the same part in other groups; None where there
            is one group.
        bucket: elements that a collective takes at a time. Beside its part of the state a rank
            holds one bucket, on a CPU two.
        **settings: betas, eps, weight_decay, clip, ratio, bias_correction and impl of `Lamb`.

    Raises:
        ValueError: as of `Lamb`; or the ranks have other parameters, in another order or with other
            values. The first one that differs is named.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        group: Any = None,
        across: Any = None,
        bucket: int = BUCKET,
        **settings: Any,
    ) -> None:
        expect(whole(bucket, 1), "bucket", "a whole number of elements, at least 1", bucket)
        remedy = "Call torch.distributed.init_process_group first; one process needs Lamb only."
        ready = dist.is_available() and dist.is_initialized()
        expect(ready, "group", "a process group", "none in this process", remedy)
        self.layout: Layout | None = None
        super().__init__(params, lr, **settings)
        parameters = self._all_parameters()
        _check_whole(parameters)
        self.group = group or dist.group.WORLD
        self.across = across
        names = [str(name) for g in self.param_groups for name in g.get("param_names", ())]
        _compare_ranks(_descriptions(parameters, names, bucket), [self.group, across])
        ranks = dist.get_world_size(self.group)
        self.layout = Layout([parameter.numel() for parameter in parameters], ranks, bucket)
        self.pieces = self.layout.shard_pieces(dist.get_rank(self.group))
        like = parameters[0]
        length = self.layout.shard_length()
        self.gradient, self.exp_avg, self.exp_avg_sq = like.new_zeros(3, length).unbind()
        self.steps = list(like.new_zeros(len(parameters), dtype=torch.float32).unbind())
        self.ranks = ranks
        if across is not None:
            self.ranks *= dist.get_world_size(across)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; ValueError once the parameters are shared out.

        Args:
            param_group: as of torch.optim.
        """
        shared_out = self.layout is not None
        wanted = "no group once the parameters are shared out"
        remedy = "Pass all groups when the optimizer is made."
        expect(not shared_out, "param_group", wanted, "one more", remedy)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state as `Lamb.state_dict` returns it, whole, on every rank.

        A collective: all ranks have to call it. What it returns does not depend on their number.
        """
        with self._whole_state():
            exp_avgs = self._gathered(self.exp_avg)
            exp_avg_sqs = self._gathered(self.exp_avg_sq)
            for index, parameter in enumerate(self._all_parameters()):
                if self.steps[index] > 0:
                    self.state[parameter] = {
                        "step": self.steps[index].clone(),
                        "exp_avg": exp_avgs[index],
                        "exp_avg_sq": exp_avg_sqs[index],
                    }
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a state that `Lamb` or any number of ranks has saved.

        Args:
            state_dict: of `Lamb.state_dict` or `ShardedLamb.state_dict`.

        Raises:
            ValueError: a tensor has another shape than its parameter, or is itself a part of one.
        """
        check_local_state(state_dict)
        with self._whole_state():
            super().load_state_dict(state_dict)
            states = [self.state.get(parameter, {}) for parameter in self._all_parameters()]
            for step, state in zip(self.steps, states, strict=True):
                step.fill_(state.get("step", 0))
            for name, shard in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
                shard.zero_()
                for piece in self.pieces:
                    saved = states[piece.parameter].get(name)
                    if saved is not None:
                        values = saved.reshape(-1)[piece.start : piece.stop]
                        _part(shard, piece).copy_(values)

    @contextmanager
    def _whole_state(self) -> Iterator[None]:
        """Within it, `state` may hold whole tensors, as that of `Lamb`."""
        try:
            yield
        finally:
            self.state.clear()

    def _update(self) -> None:
        present = self._any_gradients()
        self._reduce_gradients()
        groups = []
        first = 0
        for settings in self.param_groups:
            count = len(settings["params"])
            groups.append(self._shard(settings, first, present[first : first + count]))
            first += count
        self.gradient_norm = lamb_step(groups, clip=self.clip, kernels=self._kernels())
        self._gather_weights()

    def _shard(self, settings: dict[str, Any], first: int, present: Tensor) -> Group:
        """What this rank holds of a parameter group.

        Args:
            settings: the group, as torch.optim has it.
            first: index of its first parameter.
            present: (P,) whether a parameter has a gradient on any rank.
        """
        count = len(present)
        pieces = [piece for piece in self.pieces if first <= piece.parameter < first + count]
        owners = [piece.parameter - first for piece in pieces]
        owner_tensor = torch.tensor(owners, dtype=torch.int64, device=present.device)
        return Group(
            tensors=Tensors(
                weights=self._weights(pieces),
                gradients=[_part(self.gradient, piece) for piece in pieces],
                exp_avgs=[_part(self.exp_avg, piece) for piece in pieces],
                exp_avg_sqs=[_part(self.exp_avg_sq, piece) for piece in pieces],
            ),
            settings=settings_of(settings),
            norms=ShardNorms(owner_tensor, count, self.group, self.gradient.dtype),
            steps=self.steps[first : first + count],
            present=present,
        )

    def _weights(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """These pieces of the parameters, sharing their memory."""
        parameters = self._all_parameters()
        weights = []
        for piece in pieces:
            vector = parameters[piece.parameter].detach().view(-1)
            weights.append(vector[piece.start : piece.stop])
        return weights

    def _any_gradients(self) -> Tensor:
        """(P,) bool, whether a parameter has a gradient on any rank."""
        has = [float(parameter.grad is not None) for parameter in self._all_parameters()]
        counts = torch.tensor(has, device=self.gradient.device)
        dist.all_reduce(counts, group=self.group)
        if self.across is not None:
            dist.all_reduce(counts, group=self.across)
        return counts > 0

    def _reduce_gradients(self) -> None:
        """Write the mean over all ranks of this rank's part into `gradient`."""
        parameters = self._all_parameters()
        for bucket, mine in self._parts(self.gradient):
            flat = self.gradient.new_zeros(bucket.length)
            for piece in self._layout().bucket_pieces(bucket):
                gradient = parameters[piece.parameter].grad
                if gradient is not None:
                    values = gradient.reshape(-1)[piece.start : piece.stop]
                    _part(flat, piece).copy_(values)
            _reduce_scatter(mine, flat, self.group)
            if self.across is not None:
                dist.all_reduce(mine, group=self.across)
        self.gradient.div_(self.ranks)

    def _gather_weights(self) -> None:
        """Write the weights that each rank has updated into the parameters of all."""
        layout = self._layout()
        rank = dist.get_rank(self.group)
        for bucket in layout.buckets:
            mine = self.gradient.new_zeros(layout.part(bucket))
            pieces = layout.part_pieces(bucket, rank)
            for piece, weight in zip(pieces, self._weights(pieces), strict=True):
                _part(mine, piece).copy_(weight)
            flat = self.gradient.new_empty(bucket.length)
            dist.all_gather_into_tensor(flat, mine, group=self.group)
            pieces = layout.bucket_pieces(bucket)
            for piece, weight in zip(pieces, self._weights(pieces), strict=True):
                weight.copy_(_part(flat, piece))

    def _gathered(self, shard: Tensor) -> list[Tensor]:
        """The whole tensor of each parameter, of which each rank holds its part in `shard`."""
        whole_tensors = [torch.zeros_like(parameter) for parameter in self._all_parameters()]
        for bucket, mine in self._parts(shard):
            flat = shard.new_empty(bucket.length)
            dist.all_gather_into_tensor(flat, mine, group=self.group)
            for piece in self._layout().bucket_pieces(bucket):
                target = whole_tensors[piece.parameter].detach().view(-1)
                target[piece.start : piece.stop].copy_(_part(flat, piece))
        return whole_tensors

    def _parts(self, shard: Tensor) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with this rank's part of it in `shard`."""
        layout = self._layout()
        first = 0
        for bucket in layout.buckets:
            length = layout.part(bucket)
            yield bucket, shard[first : first + length]
            first += length

    def _layout(self) -> Layout:
        assert self.layout is not None
        return self.layout


def _reduce_scatter(mine: Tensor, flat: Tensor, group: Any) -> None:
    """Write the sum over the ranks of this rank's part of `flat` into `mine`.

    On a CPU the parts are exchanged and added up here: the reduce-scatter of gloo (torch 2.11) sums
    up a copy of all of `flat` on every rank, and throws the rest away.
    """
    if flat.device.type != "cpu":
        dist.reduce_scatter_tensor(mine, flat, group=group)
        return
    parts = torch.empty_like(flat)
    dist.all_to_all_single(parts, flat, group=group)
    torch.sum(parts.view(-1, len(mine)), 0, out=mine)


def _part(buffer: Tensor, piece: Piece) -> Tensor:
    """Where `piece` lies in `buffer`."""
    return buffer[piece.offset : piece.offset + piece.length]


def _check_whole(parameters: Sequence[Tensor]) -> None:
    """Raise ValueError for parameters that cannot be cut up."""
    remedy = "Lamb takes the DTensors of FSDP2."
    expect(not is_dtensor(parameters[0]), "params", "whole parameters", "DTensors", remedy)
    for index, parameter in enumerate(parameters):
        got = f"parameter {index} of strides {parameter.stride()}"
        expect(parameter.is_contiguous(), "params", "contiguous parameters", got)


def _descriptions(parameters: Sequence[Tensor], names: Sequence[str], bucket: int) -> list[str]:
    """A line for each parameter with a checksum of its values, and one for the bucket."""
    lines = [f"bucket={bucket}"]
    for index, parameter in enumerate(parameters):
        name = f"parameter {index}"
        if names:
            name = f"parameter {index} ({names[index]})"
        values: Any = parameter.detach().cpu().view(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(values)
        lines.append(f"{name} of shape {tuple(parameter.shape)}, checksum {checksum:08x}")
    return lines


def _compare_ranks(lines: list[str], groups: Sequence[Any]) -> None:
    """Raise ValueError, on all ranks of a group, unless they have the same lines."""
    for group in groups:
        if group is None:
            continue
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, lines, group=group)
        for rank, others in enumerate(gathered):
            _compare(gathered[0], others, rank)


def _compare(first: list[str], other: list[str], rank: int) -> None:
    """Raise ValueError where the lines of the group's `rank` differ from those of its rank 0."""
    remedy = "Build the model alike on all ranks, and broadcast its weights."
    got = f"{len(other) - 1} parameters on rank {rank}"
    expect(len(first) == len(other), "params", f"{len(first) - 1} as on rank 0", got, remedy)
    for wanted, line in zip(first, other, strict=True):
        wanted_there = f"{wanted}, as on rank 0"
        expect(line == wanted, "params", wanted_there, f"{line} on rank {rank}", remedy)
