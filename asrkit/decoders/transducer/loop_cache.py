"""`LoopCache`: the loops that were captured for one model, and until when they are valid."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from asrkit.decoders.transducer.weights import Watch, fingerprint

REGISTERING = threading.Lock()
REGISTRIES = list[dict[int, Any]]()  # of each kind of loop: caches by the identity of their model


class GraphsUnavailable(RuntimeError):
    """Why graphs cannot run."""


class LoopCache:
    """The captured loops of one model, the one used last at the end.

    Attributes:
        lock: Held by whoever decodes.
        loops: Captured loops by what they fit.
        trusted: Keys of loops whose first result was compared with the plain loop's.
        refused: Why "auto" uses no graphs any more; "" while it does.
        done: When the device has finished with the buffers.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loops = OrderedDict[tuple, Any]()
        self.weights: tuple = ()
        self.watch: Watch | None = None  # of the weights that the loops read
        self.trusted = set[tuple]()
        self.refused = ""
        self.done: torch.cuda.Event | None = None

    def follow(self, model: Any) -> None:
        """Drop all loops if weights have moved or changed dtype or shape: graphs know addresses.

        Every call checks what the loops read; the whole model is compared only if that changed.

        Raises:
            GraphsUnavailable: The model's attributes hold no tensors.
        """
        if self.watch and self.watch.still(model):
            return
        weights = tuple(fingerprint(model))
        if not any(len(entry) > 2 for entry in weights):
            raise GraphsUnavailable(
                "the model's attributes hold no tensors, "
                "so a change of its weights could not be seen"
            )
        if weights != self.weights:
            self.drop(*self.loops)
            self.weights = weights
        self.watch = Watch(model, self.watch.read) if self.watch and self.loops else None

    def drop(self, *keys: tuple) -> None:
        """Free loops, once the device has finished with them."""
        if self.done:
            self.done.synchronize()
        for key in keys:
            del self.loops[key]
            self.trusted.discard(key)

    def watch_reads(self, model: Any, storages_read: set[int] | None) -> None:
        """Watch what a new loop reads as well.

        Args:
            model: The model.
            storages_read: Addresses of the memory that its turn reads; None if nobody knows.
        """
        watched = self.watch.read if self.watch else set()
        storages = None
        if storages_read is not None and watched is not None:
            storages = watched | storages_read
        self.watch = Watch(model, storages)


C = TypeVar("C", bound=LoopCache)


def registry() -> dict[int, Any]:
    """A new registry of caches, by identity: a model need not be hashable."""
    REGISTRIES.append({})
    return REGISTRIES[-1]


def cache_of(models: dict[int, Any], model: Any, make: Callable[[], C]) -> C:
    """The cache of `model`, made at the first call; it goes when the model is deleted.

    Args:
        models: Of `registry`.
        model: The model.
        make: The class of its cache.

    Raises:
        GraphsUnavailable: Nobody would hear of the end of the model.
    """
    with REGISTERING:
        if id(model) not in models:
            try:
                weakref.finalize(model, models.pop, id(model), None).atexit = False
            except TypeError as error:
                reason = f"the model's graphs could not go when it goes: {error}"
                raise GraphsUnavailable(reason) from error
            models[id(model)] = make()
        return models[id(model)]


def release_graphs(model: Any = None) -> None:
    """Free what graphs of `model`, or of all models, hold; the next call captures again."""
    caches = []
    with REGISTERING:
        for models in REGISTRIES:
            keys = list(models) if model is None else [id(model)]
            caches += [models.pop(key) for key in keys if key in models]
    for cache in caches:
        with cache.lock:
            cache.drop(*cache.loops)


def first_cause(error: BaseException) -> str:
    """The first line of the original error: leaving a failed capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
