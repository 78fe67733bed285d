"""What Lamb and NovoGrad share: an optimizer whose step is queued, and waits for nothing.

Learning rate and steps are tensors, and a gradient that is not finite is skipped by `torch.where`,
so that the host reads no value and a CUDA graph of a step follows the schedule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asrkit.optim.norms import MeshNorms, Norms, WholeNorms, is_dtensor, local
from asrkit.shapes import expect, is_finite

DTYPES = (torch.float32, torch.float64)
MOST = torch.finfo(torch.float32).max  # of a setting


class QueuedOptimizer(torch.optim.Optimizer):
    """The parts of a torch.optim.Optimizer that do not depend on the formula of its step.

    Attributes:
        clips_gradients: true, for loops that would clip before a step.
        skips_non_finite: true, for loops that would look at the gradients before a step.
    """

    clips_gradients = True
    skips_non_finite = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch.optim does; ValueError where it is empty or wrong.

        Args:
            param_group: "params", and settings other than the defaults.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            check_alike(self._all_parameters())
        except ValueError:
            self.param_groups.pop()
            raise
        rate_of(self.param_groups[-1])  # makes the rate a tensor

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state that `state_dict` returned.

        Args:
            state_dict: of an optimizer of this kind over the same parameters.

        Raises:
            ValueError: it is that of an optimizer of another kind, a setting is out of range, or a
                tensor has another shape than this optimizer gives it. Nothing is changed then.
        """
        self._check_saved_groups(state_dict)
        self._check_states(state_dict)
        rates = [rate_of(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, rate in zip(self.param_groups, rates, strict=True):
            rate.fill_(group["lr"])  # in place: a CUDA graph, or whoever passed it, has this tensor
            group["lr"] = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns what `closure` returned, or None.

        Args:
            closure: computes the loss and its gradients again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        """Update all parameters that have a gradient."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a setting of a parameter group that is out of range.

        Args:
            group: with what `defaults` names, and "params".
        """
        raise NotImplementedError

    def _state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """Shapes of the state of a parameter by name, the count of steps aside."""
        raise NotImplementedError

    def _check_saved_groups(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError where a saved parameter group has not the settings of this optimizer."""
        parts = isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()
        expect(parts, "state_dict", "one of an optimizer", f"{state_dict!r:.60}")
        wanted = f"the state of a {type(self).__name__}"
        groups = zip(self.param_groups, state_dict["param_groups"], strict=False)
        for own, saved in groups:  # torch checks their number
            missing = sorted(self.defaults.keys() - saved.keys())
            expect(not missing, "state_dict", wanted, f"one without {missing}")
            settings = {name: saved[name] for name in self.defaults}
            rate = settings["lr"]
            if isinstance(rate, Tensor) and rate.ndim == 0:
                settings["lr"] = rate.item()  # it may lie on another device
            self._check_group(settings | {"params": own["params"]})

    def _check_states(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError where a state has not the tensors and shapes of this optimizer."""
        remedy = "A shard of a state does not fit: save by state_dict, which gathers it."
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        pairs = zip(indices, self._all_parameters(), strict=False)  # torch checks their number
        for index, parameter in pairs:
            state = state_dict["state"].get(index, {})
            if not state:
                continue  # it has had no gradient yet
            for name, shape in {"step": (), **self._state_shapes(parameter)}.items():
                value = state.get(name)
                got: object = type(value).__name__
                if isinstance(value, Tensor):
                    got = tuple(value.shape)
                wanted = f"{name} of shape {shape} for parameter {index}"
                expect(got == shape, "state_dict", wanted, got, remedy)

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def rate_of(group: dict[str, Any]) -> Tensor:
    """The learning rate of a parameter group, a tensor (); made one where a schedule wrote a float.

    Args:
        group: a parameter group of torch.optim.
    """
    rate = group["lr"]
    if not isinstance(rate, Tensor):
        parameter = group["params"][0]
        rate = torch.full((), rate, dtype=parameter.dtype, device=parameter.device)
        group["lr"] = rate
    return rate


def check_settings(group: dict[str, Any]) -> None:
    """Raise ValueError for a rate, betas, eps or weight decay that is out of range.

    Args:
        group: a parameter group of torch.optim.
    """
    wanted = "at least 0, and finite"
    expect(len(group["params"]) > 0, "params", "a parameter in each group", "none")
    rate = group["lr"]
    if isinstance(rate, Tensor):
        device = group["params"][0].device
        got = f"shape {tuple(rate.shape)} on {rate.device}"
        fits = rate.ndim == 0 and rate.device == device
        expect(fits, "lr", f"a number, or a tensor () on {device}", got)
    else:
        expect(is_finite(rate) and 0 <= rate <= MOST, "lr", wanted, f"{rate!r:.40}")
    betas = group["betas"]
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    fits = pair and all(is_finite(beta) and 0 <= beta < 1 for beta in betas)
    expect(fits, "betas", "two numbers from 0 to below 1", betas)
    for name in ("eps", "weight_decay"):
        value = group[name]
        fits = is_finite(value) and 0 <= value <= MOST
        expect(fits, name, wanted, f"{value!r:.40}")


def check_alike(parameters: Sequence[Tensor]) -> None:
    """Raise ValueError unless all parameters are of one kind.

    Args:
        parameters: of an optimizer, at least one.
    """
    first = parameters[0]
    wanted = "float32 or float64"
    remedy = "Train in half precision by torch.autocast, which keeps the weights in float32."
    expect(first.dtype in DTYPES, "params", wanted, first.dtype, remedy)
    dtypes = {parameter.dtype for parameter in parameters}
    expect(len(dtypes) == 1, "params", "one dtype", ", ".join(sorted(map(str, dtypes))))
    devices = {parameter.device for parameter in parameters}
    expect(len(devices) == 1, "params", "one device", ", ".join(sorted(map(str, devices))))
    count = sum(map(is_dtensor, parameters))
    expect(
        count in (0, len(parameters)),
        "params",
        "all DTensors, or none",
        f"{count} of {len(parameters)}",
        "Apply fully_shard to the whole model too, after its blocks.",
    )


def taking_part(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group that a step is about: those with a gradient, or all DTensors.

    Args:
        group: a parameter group of torch.optim.
    """
    parameters = group["params"]
    if any(map(is_dtensor, parameters)):  # a collective is about all of them
        return parameters
    return [parameter for parameter in parameters if parameter.grad is not None]


def norms_of(parameters: Sequence[Tensor]) -> Norms:
    """How sums of squares of these parameters' local parts become those of the whole.

    Args:
        parameters: of one parameter group; there may be none.
    """
    if any(map(is_dtensor, parameters)):
        return MeshNorms(parameters)
    if not parameters:
        return WholeNorms(torch.float32)
    return WholeNorms(parameters[0].dtype)


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's gradient of `parameter`; zeros where it has none.

    Raises:
        ValueError: it is sparse.
    """
    if parameter.grad is None:
        return torch.zeros_like(local(parameter))
    expect(
        not parameter.grad.is_sparse,
        "params",
        "dense gradients",
        "a sparse one",
        "Pass sparse=False to the embedding.",
    )
    return local(parameter.grad)


def present(parameters: Sequence[Tensor], norms: Norms, device: torch.device) -> Tensor:
    """(P,) bool, whether a parameter has a gradient on any rank.

    Args:
        parameters: of one parameter group.
        norms: of these.
        device: where they lie.
    """
    here = [float(parameter.grad is not None) for parameter in parameters]
    if all(here) and isinstance(norms, WholeNorms):
        return torch.ones(len(here), dtype=torch.bool, device=device)
    counts = torch.tensor([here], device=device)
    return norms.total(counts)[0] > 0
