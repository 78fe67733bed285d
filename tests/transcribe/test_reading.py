import threading
from collections import Counter

import pytest

from asrkit.transcribe.reading import AHEAD, OPEN, read_in_threads


def threads():
    """How many threads there are."""
    return threading.active_count()


@pytest.mark.parametrize("readers", [1, 2, 7])
@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 1, 40, 2] * 9])
def test_items_come_as_a_plain_loop_gives_them(readers, sizes):
    sources = [*enumerate(sizes)]

    def read(source):
        number, size = source
        return ((number, item) for item in range(size))

    plain = [item for source in sources for item in read(source)]
    before = threads()
    assert [*read_in_threads(iter(sources), read, readers)] == plain
    assert threads() == before


def test_no_more_is_read_ahead_than_promised():
    read_items = Counter()
    drawn = []

    def sources():
        for number in range(100):
            drawn.append(number)
            yield number

    def read(source):
        for item in range(1000):
            read_items[source] += 1
            yield item

    items = read_in_threads(sources(), read, 2)
    for _ in range(500):
        next(items)
    assert len(drawn) == 2 * OPEN
    assert 500 <= read_items[0] <= 500 + AHEAD + 1
    assert sum(read_items.values()) - read_items[0] <= (2 * OPEN - 1) * (AHEAD + 1)
    items.close()


def test_an_error_is_raised_in_its_place_and_the_readers_end():
    def read(source):
        yield from range(source)
        if source == 3:
            raise RuntimeError("torn")

    before, seen = threads(), []
    with pytest.raises(RuntimeError, match="torn"):
        seen.extend(read_in_threads([2, 3, 900, 900], read, 2))
    assert seen == [0, 1, 0, 1, 2] and threads() == before


def test_who_stops_asking_leaves_no_reader_behind():
    before = threads()
    items = read_in_threads(range(100), lambda source: iter(range(10_000)), 4)
    assert next(items) == 0
    items.close()
    assert threads() == before
