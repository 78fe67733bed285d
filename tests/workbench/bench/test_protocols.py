"""Latencies by the published rule and by ours, and the grid that they are taken of."""

import statistics

import numpy as np
import pytest
import torch

from asrkit.models import CTCConfig, CTCModel, JasperConfig, Stage, presets
from asrkit.workbench.bench import protocols
from asrkit.workbench.bench.protocols import ours, published_latency
from asrkit.workbench.bench.suites import jasper

pytestmark = pytest.mark.usefixtures("one_thread")


def by_the_script(latencies, shares=(0.9, 0.95, 0.99)):
    """The rule of the published script, transcribed: thresholds first, in the order of its list."""
    ordered = sorted(latencies, reverse=True)
    places = {share: int(len(latencies) * (1 - share)) for share in shares}
    return [ordered[places[share]] for share in shares] + [
        sum(latencies) / len(latencies)
    ]


@pytest.mark.parametrize("count", [20, 21, 99, 100, 101, 495, 500, 1000])
def test_percentiles_are_those_of_the_published_rule(count):
    samples = np.random.default_rng(count).gamma(3.0, size=count).tolist()
    found = published_latency(samples)
    wanted = by_the_script(samples)
    assert [found["p90"], found["p95"], found["p99"]] == wanted[:3]
    assert found["avg"] == pytest.approx(wanted[3])


def test_the_published_average_is_the_mean_and_ours_the_median():
    samples = [1.0] * 19 + [100.0]
    assert published_latency(samples)["avg"] == pytest.approx(5.95)
    assert ours(samples)["p50"] == 1.0
    found = ours([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == {"p25": 2.0, "p50": 3.0, "p75": 4.0}
    draws = np.random.default_rng(1).gamma(2.0, size=101)
    for name, percent in (("p25", 25), ("p50", 50), ("p75", 75)):
        assert ours(draws.tolist())[name] == pytest.approx(
            np.percentile(draws, percent)
        )


def test_a_list_of_which_the_script_makes_no_table_is_refused():
    with pytest.raises(
        ValueError, match="samples_s: expected at least 20, got 19. The published"
    ):
        published_latency([1.0] * 19)
    with pytest.raises(ValueError, match="samples_s: expected at least 2, got 1"):
        ours([1.0])


class Clock:
    """time.perf_counter that advances when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_first_six_of_the_published_iterations_do_not_count(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(protocols.time, "perf_counter", clock)
    calls = []

    def call():
        calls.append(len(calls))
        clock.now += len(calls)

    autotune = torch.backends.cudnn.benchmark
    device = torch.device("cpu")
    samples = protocols.protocol_samples(
        call, device, protocols.ITERATIONS, protocols.WARM_UP
    )
    assert len(calls) == 10 + 501 and len(samples) == 495
    assert samples[0] == 10 + 6 + 1 and samples[-1] == 511
    assert torch.backends.cudnn.benchmark == autotune


@pytest.fixture(scope="module")
def small():
    first = Stage(channels=8, kernel=5, repeat=1, stride=2, dense=False)
    encoder = JasperConfig(stages=(first, Stage(channels=8, kernel=3, repeat=2)))
    return jasper.random_jasper(CTCConfig(vocab_size=28, encoder=encoder), "cpu")


def test_a_grid_has_a_cell_for_each_combination_with_both_statistics(small):
    cells = protocols.grid(
        small,
        (1, 2),
        (0.1, 0.2),
        ("float32", "bfloat16"),
        iterations=26,
        warm_up=1,
    )
    combinations = [(cell.precision, cell.seconds, cell.batch) for cell in cells]
    assert combinations == [
        (precision, seconds, batch)
        for precision in ("float32", "bfloat16")
        for seconds in (0.1, 0.2)
        for batch in (1, 2)
    ]
    for cell in cells:
        assert len(cell.samples_s) == 20
        assert cell.published["avg"] == pytest.approx(statistics.fmean(cell.samples_s))
        assert cell.published["p99"] == max(cell.samples_s)  # int(20 * (1 - 0.99)) is 0
        latency = cell.as_latency()
        assert latency.latency_ms == pytest.approx(
            1e3 * statistics.median(cell.samples_s)
        )
        assert (latency.batch, latency.FLOP) == (cell.batch, cell.FLOP)
    assert cells[1].FLOP == 2 * cells[0].FLOP
    assert next(small.parameters()).dtype == torch.float32


@pytest.mark.parametrize(("changes", "said"), [
    ({"seconds": (0.105,)}, "seconds: expected a multiple of a frame of 10 ms, got 0.105"),
    ({"seconds": (0.0,)}, "seconds: expected a multiple"),
    ({"precisions": ("tf32",)}, "precision: expected 'tf32' on CUDA only"),
    ({"precisions": ("int8",)}, "precision: expected one of .*float32"),
    ({"iterations": 25}, "iterations: expected at least 26, got 25"),
])  # fmt: skip
def test_a_grid_that_cannot_be_measured_is_refused(small, changes, said):
    how = {
        "batches": (1,),
        "seconds": (0.1,),
        "precisions": ("float32",),
        "iterations": 26,
    }
    with pytest.raises(ValueError, match=said):
        protocols.grid(small, **how | changes)


def test_a_model_that_trains_is_refused():
    model = CTCModel(presets.mini_jasper()).train()
    with pytest.raises(
        ValueError, match="model: expected eval mode, got training mode"
    ):
        protocols.grid(model, (1,), (0.1,), iterations=26)
