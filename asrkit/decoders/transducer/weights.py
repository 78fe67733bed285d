"""Whether the weights that a captured loop reads are still where they were.

A CUDA graph knows weights by their addresses, so it must be captured again when one moves. `Watch`
answers that before every replay, and so has to be cheap.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import getitem
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

# containers, closures and objects that are looked through, one in another; modules to any depth
DEPTH = 3
PLAIN = {type(None), bool, int, float, str}  # types that hold no tensor
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # what every module has
GONE = (LookupError, AttributeError, TypeError, ValueError)  # of a path that has been broken


def fingerprint(held: Any, depth: int = DEPTH) -> Iterator[tuple]:
    """Yield (address, dtype, shape, device) of each tensor of a model and (mode,) of each module.

    Args:
        held: A model, or any object that holds tensors.
        depth: How many containers, closures and attributes of objects to look through; submodules
            are followed to any depth.
    """
    if isinstance(held, Tensor):
        yield mark(held)
    elif isinstance(held, nn.Module) and depth >= 0:
        for module in held.modules():
            yield (module.training,)
            for part in _parts(module):
                yield from fingerprint(part.held, depth - 1)
    elif depth > 0:
        for part in _parts(held):
            yield from fingerprint(part.held, depth - 1)


def mark(held: Any) -> tuple:
    """What must not change of an object for a captured graph to stay valid.

    Address, dtype, shape and device of a tensor; mode and number of attributes of anything else.
    """
    if isinstance(held, Tensor):
        return held.data_ptr(), held.dtype, held.shape, held.device
    return getattr(held, "training", None), len(getattr(held, "__dict__", ()))


class _Link(NamedTuple):
    """Leads from the object number `parent` to the next one: get(parent, name)."""

    parent: int
    get: Callable[[Any, Any], Any]
    name: Any


class Watch:
    """The attribute paths of a model that lead to the tensors a turn reads.

    The paths are kept as names, so a watch keeps nothing alive. `still` follows only these paths:
    an encoder of a thousand modules that no turn reads costs nothing.

    Attributes:
        read: Addresses of the memory that was read; None for every tensor.
        steps: The paths, as a tree: step n leads to object n + 1; the model is object 0.
        marked: Numbers of the objects that must not change.
        marks: Their marks when the watch was made.
    """

    def __init__(self, model: Any, read: set[int] | None) -> None:
        self.read = read
        self.steps = list[_Link]()
        self.marked = list[int]()
        self._entered = set[int]()  # owners being looked through; a cycle does not enter them again
        self._follow(model, 0, DEPTH)
        self.marks = self.now(model)

    def still(self, model: Any) -> bool:
        """Whether every watched tensor and module is unchanged and in its place."""
        try:
            return self.now(model) == self.marks
        except GONE:
            return False

    def now(self, model: Any) -> list[tuple]:
        """The marks of all that is watched, as of now."""
        objects = [model]
        for parent, get, name in self.steps:
            objects.append(get(objects[parent], name))
        return [mark(objects[number]) for number in self.marked]

    def _follow(self, held: Any, number: int, depth: int) -> bool:
        """Whether object `number` leads to a tensor that was read; if not, it is not watched."""
        if isinstance(held, Tensor):
            leads = self.read is None or held.untyped_storage().data_ptr() in self.read
        else:
            leads = self._follow_parts(held, number, depth)
        if leads:
            self.marked.append(number)
        return leads

    def _follow_parts(self, held: Any, number: int, depth: int) -> bool:
        is_module = isinstance(held, nn.Module)
        if depth < 0 or (depth == 0 and not is_module) or id(held) in self._entered:
            return False
        self._entered.add(id(held))
        weightless = list[_Part]()
        leads = False
        for part in _parts(held, submodules=True):
            is_submodule = is_module and isinstance(part.held, nn.Module) and part.get is _submodule
            steps_before = len(self.steps)
            marked_before = len(self.marked)
            self.steps.append(_Link(number, part.get, part.name))
            if self._follow(part.held, len(self.steps), depth if is_submodule else depth - 1):
                leads = True
                continue
            del self.steps[steps_before:]
            del self.marked[marked_before:]
            if is_submodule and _has_no_weights(part.held):
                weightless.append(part)
        self._entered.discard(id(held))
        if leads:
            for part in weightless:  # the mode of a dropout must not change either
                self.steps.append(_Link(number, part.get, part.name))
                self.marked.append(len(self.steps))
        return leads


class _Part(NamedTuple):
    """Something that an owner holds: get(owner, name) is `held`."""

    get: Callable[[Any, Any], Any]
    name: Any
    held: Any


def _parts(held: Any, submodules: bool = False) -> Iterable[_Part]:
    """What an object holds, apart from plain values."""
    return [part for part in _all_parts(held, submodules) if type(part.held) not in PLAIN]


def _all_parts(held: Any, submodules: bool) -> Iterator[_Part]:
    if isinstance(held, nn.Module):
        yield from (_Part(_parameter, name, part) for name, part in held._parameters.items())
        yield from (_Part(_buffer, name, part) for name, part in held._buffers.items())
        yield from (
            _Part(_submodule, name, part) for name, part in held._modules.items() if submodules
        )
        yield from (
            _Part(_attribute, name, part)
            for name, part in vars(held).items()
            if name not in MODULE_ATTRIBUTES
        )
    elif isinstance(held, dict | list | tuple):
        names = held if isinstance(held, dict) else range(len(held))
        yield from (_Part(getitem, name, held[name]) for name in names)
    elif isinstance(held, MethodType):
        yield _Part(getattr, "__self__", held.__self__)
    elif isinstance(held, FunctionType):
        yield from (
            _Part(_enclosed, number, cell.cell_contents)
            for number, cell in enumerate(held.__closure__ or ())
        )
    elif not isinstance(held, type):
        yield from (
            _Part(_attribute, name, part) for name, part in getattr(held, "__dict__", {}).items()
        )


def _parameter(module: nn.Module, name: str) -> Any:
    return module._parameters[name]


def _buffer(module: nn.Module, name: str) -> Any:
    return module._buffers[name]


def _submodule(module: nn.Module, name: str) -> Any:
    return module._modules[name]


def _attribute(held: Any, name: str) -> Any:
    return vars(held)[name]


def _enclosed(function: FunctionType, number: int) -> Any:
    return function.__closure__[number].cell_contents  # type: ignore[index]


def _has_no_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None
