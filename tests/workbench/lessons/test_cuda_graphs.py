import pytest
import torch

from asrkit.decoders import transducer_greedy
from asrkit.workbench.bench.planted import planted
from asrkit.workbench.lessons.cuda_graphs import five_waits, turns


def test_each_cure_computes_the_same_and_waits_for_nothing():
    rows = five_waits.counted(8)
    assert len(rows) == 5
    assert all(row["waits"] > 0 == row["waits "] for row in rows)


def test_a_cure_that_computes_something_else_is_found(monkeypatch):
    wrong = five_waits.Cure("a mean", "loud.mean()", "loud.sum()")
    monkeypatch.setattr(five_waits, "CURES", (wrong,))
    with pytest.raises(AssertionError, match="a mean"):
        five_waits.counted(8)


@pytest.mark.parametrize("k", [1, 3])
def test_a_decode_in_blocks_has_the_same_output_and_runs_whole_blocks(k):
    plan = planted(3, 20, V=17, width=340)
    with torch.inference_mode():
        found, ran = turns.blocks_of_turns(k, plan.model, plan.encoded, plan.lengths)
    eager = transducer_greedy(plan.model, plan.encoded, plan.lengths, graphs="off")
    assert all(map(torch.equal, found.parts(), eager.parts()))
    assert ran % k == 0 and ran > max(map(len, plan.labels))
