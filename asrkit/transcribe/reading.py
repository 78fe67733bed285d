"""Threads that read recordings ahead of whoever uses them, in the order of the recordings."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Full, Queue
from threading import Event
from typing import Any, NamedTuple, TypeVar

S = TypeVar("S")
T = TypeVar("T")
OPEN = 2  # sources under way for each reader: one that it reads, and the next one
AHEAD = 4  # most items of one source that wait to be used
POLL_S = 0.1  # how often a reader that waits looks whether anybody still wants what it has


class _Failure(NamedTuple):
    """What reading a source raised."""

    error: BaseException


_END: Any = object()


def read_in_threads(
    sources: Iterable[S], read: Callable[[S], Iterable[T]], readers: int
) -> Iterator[T]:
    """Yield the items of `read(source)` for each source, in order, as a plain loop would.

    Each source is read by one thread. OPEN * readers sources are under way, and AHEAD items of each
    wait at most, so memory is bounded. What `read` raises is raised where the loop would raise it.

    Args:
        sources: drawn one by one, in the thread that asks for items.
        read: reads one source.
        readers: threads that read, at least 1.
    """
    remaining = iter(sources)
    stop = Event()
    queues: deque[Queue[Any]] = deque()
    with ThreadPoolExecutor(readers) as pool:
        try:
            while True:
                for source in itertools.islice(remaining, OPEN * readers - len(queues)):
                    queue: Queue[Any] = Queue(AHEAD)
                    queues.append(queue)
                    pool.submit(_fill, queue, read, source, stop)
                if not queues:
                    return
                yield from _items(queues.popleft())
        finally:
            stop.set()  # nobody takes what the readers still hold


def _fill(queue: "Queue[Any]", read: Callable[[S], Iterable[T]], source: S, stop: Event) -> None:
    """Put the items of one source into its queue, then what ended it."""
    try:
        for item in read(source):
            if not _put(queue, item, stop):
                return
    except BaseException as error:  # raised again by whoever takes the items
        _put(queue, _Failure(error), stop)
    else:
        _put(queue, _END, stop)


def _put(queue: "Queue[Any]", item: Any, stop: Event) -> bool:
    """Wait for room and put `item` into it; False if nobody wants it any more."""
    while not stop.is_set():
        try:
            queue.put(item, timeout=POLL_S)
            return True
        except Full:
            continue
    return False


def _items(queue: "Queue[Any]") -> Iterator[Any]:
    while (item := queue.get()) is not _END:
        if isinstance(item, _Failure):
            raise item.error
        yield item
