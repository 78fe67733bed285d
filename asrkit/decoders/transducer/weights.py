"""Where a model holds the weights that a captured loop reads: a graph knows them by their
addresses.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import getitem
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

# containers, closures and objects that are looked through, one in another; modules to any depth
DEPTH = 3
PLAIN, OWN = (
    {type(None), bool, int, float, str},
    frozenset(vars(nn.Module())),
)  # what holds no tensor; what every module has
GONE = (LookupError, AttributeError, TypeError, ValueError)  # of a step that leads nowhere any more


def fingerprint(held: Any, depth: int = DEPTH) -> Iterator[tuple]:
    """Address, dtype, shape and device of each tensor that `held` leads to, and the mode of each
    module.

    Through modules all the way; through containers, closures and attributes of other objects
    `depth` times.
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
    """What may not change: where a tensor lies and how it is read, the mode of a module and how
    many attributes it has.
    """
    if isinstance(held, Tensor):
        return held.data_ptr(), held.dtype, held.shape, held.device
    return getattr(held, "training", None), len(getattr(held, "__dict__", ()))


class Watch:
    """The ways through a model to the tensors that lie at the addresses `read` (None: to all), by
    names: it keeps nothing alive.

    `still` goes these ways only. An encoder of a thousand modules that no turn has read costs
    nothing.
    """

    def __init__(self, model: Any, read: set[int] | None) -> None:
        self.read, self.steps, self.marked = (
            read,
            list[tuple[int, Callable[[Any, Any], Any], Any]](),
            list[int](),
        )
        self.within = set[
            int
        ]()  # whose parts are being looked at: owners that their parts know are not entered again
        self._follow(model, 0, DEPTH)
        self.marks = self.now(model)

    def still(self, model: Any) -> bool:
        """Whether each of these tensors is held where it was and lies where it lay, and modules are
        in their modes.
        """
        try:
            return self.now(model) == self.marks
        except GONE:
            return False

    def now(self, model: Any) -> list[tuple]:
        """The marks of all that is watched."""
        places = [model]
        for parent, get, name in self.steps:
            places.append(get(places[parent], name))
        return [mark(places[number]) for number in self.marked]

    def _follow(self, held: Any, number: int, depth: int) -> bool:
        """Whether `held`, which is place `number`, leads to a tensor that was read; if not, nothing
        of it is watched.
        """
        if isinstance(held, Tensor):
            leads = self.read is None or held.untyped_storage().data_ptr() in self.read
        else:
            leads = self._through(held, number, depth)
        if leads:
            self.marked.append(number)
        return leads

    def _through(self, held: Any, number: int, depth: int) -> bool:
        module = isinstance(held, nn.Module)
        if depth < 0 or (depth == 0 and not module) or id(held) in self.within:
            return False
        self.within.add(id(held))
        silent, leads = list[_Part](), False
        for part in _parts(held, submodules=True):
            below = isinstance(part.held, nn.Module) and module and part.get is _submodule
            many = len(self.steps), len(self.marked)
            self.steps.append((number, part.get, part.name))
            if self._follow(part.held, len(self.steps), depth if below else depth - 1):
                leads = True
            else:
                del self.steps[many[0] :], self.marked[many[1] :]
                silent += [part] * (below and _empty(part.held))
        self.within.discard(id(held))
        for part in silent if leads else ():  # a dropout has no weights and may not wake either
            self.steps.append((number, part.get, part.name))
            self.marked.append(len(self.steps))
        return leads


class _Part(NamedTuple):
    """`get(owner, name)` is `held`."""

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
            _Part(_attribute, name, part) for name, part in vars(held).items() if name not in OWN
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


def _empty(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None
