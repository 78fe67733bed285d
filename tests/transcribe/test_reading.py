import threading
from collections import Counter

import pytest

from asrkit.transcribe import WindowOptions, transcribe
from asrkit.transcribe.reading import AHEAD, OPEN, read_in_threads

ENOUGH_S = 20.0  # a thread that has not come by then will not come


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


def test_several_sources_are_read_at_once():
    together = threading.Barrier(3)

    def read(source):
        together.wait(ENOUGH_S)  # passes only when three readers are here
        yield source

    assert [*read_in_threads(range(6), read, 3)] == [*range(6)]


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


@pytest.mark.parametrize("readers", [1, 5])
def test_transcripts_do_not_depend_on_the_number_of_readers(learned, speech, long_file, readers):
    files = [*speech, long_file, long_file.with_name("none.wav"), *speech]
    wanted = [*transcribe(learned, files, options=WindowOptions(readers=3, batch_s=4))]
    heard = [*transcribe(learned, files, options=WindowOptions(readers=readers, batch_s=4))]
    assert [(one.path, one.text, one.error) for one in heard] == [
        (one.path, one.text, one.error) for one in wanted
    ]
    assert [bool(one.error) for one in heard] == [False] * 7 + [True] + [False] * 6
