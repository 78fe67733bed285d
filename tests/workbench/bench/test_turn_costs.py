import math

import pytest
import torch

from asrkit.decoders import transducer_greedy
from asrkit.workbench import cost
from asrkit.workbench.bench import five_waits, turn_costs
from asrkit.workbench.bench.planted import planted

COSTS = turn_costs.LaunchCosts(host_us=5.0, kernel_us=2.0, flag_us=10.0, replay_us=8.0)


def test_each_cure_computes_the_same_and_waits_for_nothing():
    rows = five_waits.counted(8)
    assert len(rows) == 5
    assert all(row["waits"] > 0 == row["waits "] for row in rows)


def test_a_cure_that_computes_something_else_is_found(monkeypatch):
    wrong = five_waits.Cure("a mean", "loud.mean()", "loud.sum()")
    monkeypatch.setattr(five_waits, "CURES", (wrong,))
    with pytest.raises(AssertionError, match="a mean"):
        five_waits.counted(8)


def test_a_gpu_waits_for_launches_of_short_kernels_and_the_host_for_long_ones():
    _, short = turn_costs.lanes(3, host_us=5, device_us=2)
    assert short == [(5, 2), (10, 2), (15, 2)]
    _, long = turn_costs.lanes(3, host_us=5, device_us=9, start_us=1)
    assert long == [(6, 9), (15, 9), (24, 9)]


def test_two_turns_with_a_wait_take_longest_and_in_a_graph_least():
    ends = {way: sum(gpu[-1]) for way, (_, gpu) in turn_costs.schedules(4, COSTS).items()}
    assert ends == {"a wait a turn": 22 + 10 + 22, "no wait": 42, "a graph": 8 + 16}


def test_a_decode_takes_what_the_formulas_on_the_page_say():
    times = turn_costs.decode_us(5, launches=4, k=2, costs=COSTS)
    assert times == {
        "one by one": 5 * (20 + 20),
        "graph of k, flag after": 3 * (8 + 16 + 10),
        "graph of k, flag asynchronous": 4 * 16 + 10,
        "WHILE node": 8 + 5 * 5 * 2,
    }


def test_a_turn_at_a_cards_peak_is_limited_by_memory_for_one_utterance_and_by_arithmetic_for_many():
    card = next(card for card in cost.CARDS if card.name == "H100")
    weights = 1025 * 640 + 9 * 640 * 640
    one = turn_costs.peak_turn_us(1, card, D=640, V=1025)
    assert one == pytest.approx(4 * (weights + 8 * (640 + 1025)) / 3350e3)
    many = turn_costs.peak_turn_us(4096, card, D=640, V=1025)
    flops = 2 * 4096 * (9 * 640 * 640 + 8 * 640 * 1025)
    assert many == pytest.approx(flops / 67e6)


@pytest.mark.parametrize(("low", "most", "growth", "sizes"), [
    (1, 64, 2, [1, 2, 4, 8, 16, 32, 64]), (1, 5, 1.1, [1, 2, 3, 4, 5]), (12, 250, 8, [12, 96, 250]), (3, 3, 2, [3]),
])  # fmt: skip
def test_bucket_sizes_grow_by_a_factor_and_end_at_the_largest(low, most, growth, sizes):
    assert turn_costs.bucket_sizes(low, most, growth) == sizes


def test_the_share_wasted_is_padding_over_the_padded_total():
    assert turn_costs.wasted([1, 2, 3, 4], [4]) == pytest.approx(1 - 10 / 16)
    assert turn_costs.wasted([1, 2, 3], [1, 2, 3]) == 0


@pytest.mark.parametrize("k", [1, 3])
def test_a_decode_in_blocks_has_the_same_output_and_runs_whole_blocks(k):
    plan = planted(3, 20, V=17, width=340)
    with torch.inference_mode():
        found, turns = turn_costs.blocks_of_turns(k, plan.model, plan.encoded, plan.lengths)
    eager = transducer_greedy(plan.model, plan.encoded, plan.lengths, graphs="off")
    assert all(map(torch.equal, found.parts(), eager.parts()))
    assert turns % k == 0 and turns > max(map(len, plan.labels))


def test_the_buffers_of_a_loop_are_what_the_allocator_gives():
    plan = planted(2, 20, V=17, width=340)
    counted = sum(size for _, size in turn_costs.buffer_bytes(16, 512, 340))
    allocated = turn_costs.allocated_bytes(plan.model, plan.encoded, 16, 512)
    assert math.isclose(counted, allocated, rel_tol=0.02)
