"""The rest of a part after each window, and the order in which windows of several recordings are decoded."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.decoders.hypotheses import Segment, Segments
from asrkit.transcribe.parts import Part, Schedule, Span, after_window, text_until
from asrkit.transcribe.words import Label

RATE_HZ, FRAME = 16_000, 320
FIRST_S = 100  # where the part begins in its recording
EVERY_HALF = tuple(n / 2 for n in range(20))  # of ten seconds


def part_of(seconds, todo, quiet=(), **rest):
    """A part that sounds, except for each (start_s, end_s) of `quiet`."""
    sounds = torch.ones(round(seconds * 50), dtype=torch.bool)
    for start_s, end_s in quiet:
        sounds[round(start_s * 50) : round(end_s * 50)] = False
    start, end = FIRST_S * RATE_HZ, round((FIRST_S + seconds) * RATE_HZ)
    fields = {"path": Path("a"), "start": start, "end": end, "last": True, **rest}
    return Part(waveform=torch.zeros(0), sounds=sounds, todo=tuple(todo), **fields)


def span(start_s, end_s, is_gap=False):
    return Span(round(start_s * RATE_HZ), round(end_s * RATE_HZ), is_gap)


def labels_at(times_s):
    return [Label(n, FIRST_S + time_s, FIRST_S + time_s + 0.1, 1.0) for n, time_s in enumerate(times_s)]  # fmt: skip


def segments_of(*whole, cut_off=False, temperature=0.0, log_prob=-0.1):
    """Segments, one for each (labels, end_s)."""
    made = (Segment(count, round(end_s * 50)) for count, end_s in whole)
    return Segments(tuple(made), cut_off, temperature, log_prob)


def times(part):
    """The seconds of labels, and of the remaining spans."""
    starts_s = [round(label.start_s - FIRST_S, 2) for label in part.labels]
    left = [(one.start / RATE_HZ, one.end / RATE_HZ, one.is_gap) for one in part.todo]
    return starts_s, left


def decoded(part, labels_s, segments, size_s=10):
    more = len(labels_s) > sum(one.labels for one in segments.whole)
    segments = segments._replace(cut_off=segments.cut_off or more)
    found = labels_at(labels_s), segments, RATE_HZ, FRAME
    return after_window(part, size_s * RATE_HZ, *found)


# times of labels; (labels, end_s) of whole segments; what is quiet; labels that are kept; what is left
WINDOWS = {
    "a whole text": (EVERY_HALF, [(8, 4), (12, 9.8)], [], 20, [(10, 20, False)]),
    "a segment is cut off": (EVERY_HALF, [(8, 4), (4, 6)], [], 12, [(6, 20, False)]),
    "hardly any progress": (EVERY_HALF, [(1, 0.2)], [], 2, [(1, 20, False)]),
    "no segment is whole": (EVERY_HALF, [], [], 20, [(10, 20, False)]),
    "no text": ((), [], [], 0, [(10, 20, False)]),
    "silence after it": (EVERY_HALF, [(20, 9.8)], [(10, 20)], 20, []),
    "hardly a sound after it": (EVERY_HALF, [(20, 9.8)], [(10.28, 20)], 20, []),
    "words are missing": (
        (0, 0.5, 1, 6, 6.5, 7, 8, 9, 9.5), [(9, 9.8)], [(1.4, 1.6), (5.5, 5.8)], 9,
        [(10, 20, False), (1.4, 5.8, True)],
    ),
    "words are missing at its ends": (
        (3, 3.5, 4, 5, 6, 7), [(6, 9.8)], [(2.5, 2.8), (7.2, 7.4)], 6,
        [(10, 20, False), (0, 2.8, True), (7.2, 10, True)],
    ),
    "what is missing is short": (
        (0, 0.5, 1, 3.2, *EVERY_HALF[7:]), [(17, 9.8)], [(1.4, 1.6), (3, 3.2)], 17,
        [(10, 20, False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "labels_s, whole, quiet, kept, left", WINDOWS.values(), ids=WINDOWS
)
def test_the_next_window_begins_where_the_last_whole_segment_ended(
    labels_s, whole, quiet, kept, left
):
    before = part_of(20, [span(0, 20)], quiet)
    after = decoded(before, labels_s, segments_of(*whole))
    assert times(after) == ([*labels_s[:kept]], left)
    assert [*after.previous] == [*range(kept)]


def test_a_second_timestamp_begins_a_segment_that_has_no_label_yet():
    before = part_of(20, [span(0, 20)])
    after = decoded(before, EVERY_HALF[:8], segments_of((8, 4), cut_off=True))
    assert times(after) == ([*EVERY_HALF[:8]], [(4, 20, False)])


@pytest.mark.parametrize("quiet, kept, left", [
    ([(12, 20)], 20, []), ([(13, 20)], 4, [(12, 20, False)]),
])  # fmt: skip
def test_at_the_end_of_a_part_all_labels_are_kept_unless_sound_follows(
    quiet, kept, left
):
    earlier = labels_at([1, 2])
    before = part_of(20, [span(10, 20)], quiet, labels=earlier, previous=[8, 9])
    late = [10 + time_s for time_s in EVERY_HALF]
    after = decoded(before, late, segments_of((4, 2)))
    assert times(after) == ([1, 2, *late[:kept]], left)
    assert [*after.previous] == [8, 9, *range(kept)]


@pytest.mark.parametrize("todo, size_s, quiet, until_s", [
    (span(0, 20), 10, [], 0),  # the part continues after the window: a segment may be cut off
    (span(0, 10), 10, [], 9.52),  # at 9.5 s half a second of sound is left
    (span(0, 10), 10, [(8, 10)], 7.52),
    (span(2, 10), 8, [(8, 10)], 5.52),  # frames count from where the window begins
    (span(0, 10), 10, [(0, 9.6)], 0),  # less than half a second in all
    (span(0, 10, is_gap=True), 10, [], 0),  # perhaps no speech
])  # fmt: skip
def test_text_is_required_up_to_the_last_half_second_of_sound(
    todo, size_s, quiet, until_s
):
    part = part_of(20, [todo], quiet)
    until = text_until(part, size_s * RATE_HZ, RATE_HZ, FRAME)
    assert until == round(until_s * 50)


def test_windows_go_on_from_where_they_began():
    before = part_of(40, [span(10, 40)])
    late = [10, 10.5, 13.5, 14, 14.5, 15, 18]
    after = decoded(before, late, segments_of((6, 6)))
    assert times(after) == (late[:6], [(16, 40, False), (11.1, 13.5, True)])


@pytest.mark.parametrize("temperature, log_prob, sure", [
    (0.0, -0.5, True), (0.4, -0.5, True), (0.6, -0.5, False), (0.0, -0.9, False),
])  # fmt: skip
def test_a_gap_is_decoded_once_and_its_text_kept_if_it_is_likely(
    temperature, log_prob, sure
):
    """The whole gap still sounds, and its text ends inside a segment; it is not decoded again."""
    left = [span(2, 8, True), span(12, 15, True)]
    before = part_of(20, left, labels=labels_at([1, 9]), previous=[5])
    segments = segments_of((1, 1), temperature=temperature, log_prob=log_prob)
    after = decoded(before, [6.5, 2.5], segments, size_s=6)
    assert times(after) == ([1, 2.5, 6.5, 9] if sure else [1, 9], [(12, 15, True)])
    assert after.previous == [5]


def test_an_unlikely_text_is_no_prompt_for_the_next_window():
    before = part_of(20, [span(0, 20)], previous=[7])
    after = decoded(before, EVERY_HALF, segments_of((20, 9.8), temperature=0.6))
    assert len(after.labels) == 20
    assert not after.previous


class Simulation:
    """Recordings of random parts, whose windows are decoded in the order of a Schedule, with random remainders."""

    def __init__(self, seed, fails=0.1, **options):
        self.random, self.fails = random.Random(seed), fails
        self.schedule = Schedule(self.batches, **options)
        self.batch_of = []  # what was decoded: paths, starts, languages and texts before
        self.pools = [[]]
        for name in range(self.random.randint(1, 6)):
            count = self.random.randint(1, 5)
            for number in range(count):
                todo = [span(0, 1)] * self.random.randint(0, 1)
                fields = {"path": Path(str(name)), "last": number == count - 1}
                part = part_of(1, todo, **fields)
                self.pools[-1].append(part._replace(start=number))
                if self.random.random() < 0.4:
                    self.pools.append([])

    def batches(self, numbers, parts):
        numbers, size = sorted(numbers), self.random.randint(1, 4)
        assert {*numbers} <= {*parts}
        return [numbers[n : n + size] for n in range(0, len(numbers), size)]

    def window(self, part):
        """The part after a window: it may have another one, or fail."""
        assert part.todo
        if self.random.random() < self.fails:
            return part._replace(error="no memory")
        more = [span(0, 1)] * (self.random.random() < 0.4)
        text = [*part.previous, len(self.batch_of)]
        return part._replace(todo=tuple(more), language="en", previous=text)

    def run(self):
        """All parts as they are done."""
        for pool in self.pools:
            self.schedule.add(pool)
            yield from self.schedule.done()
            last = pool is self.pools[-1]
            while self.schedule.left and (last or self.random.random() < 0.7):
                numbers = self.schedule.next_batch()
                parts = self.schedule.batch(numbers)
                self.batch_of.append(parts)
                self.schedule.decoded(numbers, [*map(self.window, parts)])
                yield from self.schedule.done()

    def windows(self):
        """(path, part, the decoded part) in order of time."""
        return [part for batch in self.batch_of for part in batch]


SEEDS = st.integers(0, 10**6)


@given(SEEDS, st.booleans(), st.booleans())
def test_parts_are_done_in_order_and_an_error_ends_a_part(seed, shows_text, finds):
    run = Simulation(seed, shows_text=shows_text, finds_language=finds)
    done = [*run.run()]
    wanted = [part[:2] for pool in run.pools for part in pool]
    assert [part[:2] for part in done] == wanted
    assert all(part.error or not part.todo for part in done)
    assert not any(part.error for part in run.windows())
    assert not run.schedule.parts and not run.schedule.latest


@given(SEEDS)
def test_the_first_window_of_a_recording_comes_before_its_others(seed):
    run = Simulation(seed, fails=0, shows_text=False, finds_language=True)
    for _ in run.run():
        pass
    known = set()
    for batch in run.batch_of:
        assert all(bool(part.language) == (part.path in known) for part in batch)
        paths = [part.path for part in batch if not part.language]
        assert len(paths) == len({*paths})
        known.update(paths)


@given(SEEDS)
def test_text_is_carried_on_part_by_part(seed):
    run = Simulation(seed, fails=0, shows_text=True, finds_language=False)
    for _ in run.run():
        pass
    assert all(len(batch) == 1 for batch in run.batch_of)
    starts, texts = {}, {}
    for number, part in enumerate(run.windows(), 1):
        assert part.start >= starts.get(part.path, 0)
        assert [*part.previous] == texts.get(part.path, [])
        starts[part.path] = part.start
        texts[part.path] = [*part.previous, number]
