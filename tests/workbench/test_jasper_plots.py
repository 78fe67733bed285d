"""Pictures of Jasper's tables show the numbers that they are given."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from asrkit.models import JasperConfig
from asrkit.workbench import plots
from asrkit.workbench.cost import published_latencies, two_numbers
from asrkit.workbench.jasper_studies import TrainingMemory, seed_runs
from asrkit.workbench.plots.jasper import PRECISIONS
from asrkit.workbench.plots.svg import as_svg

A100 = published_latencies("DGX A100", "FP16")


def dots(ax):
    return [line for line in ax.lines if line.get_linestyle() == "None"]


def lines(ax):
    return [line for line in ax.lines if line.get_linestyle() == "-"]


def test_every_cell_is_a_dot_and_the_line_is_the_fitted_maximum():
    figure, ax = plots.canvas("Two numbers")
    groups = {"A100, FP16": A100, "A100, TF32": published_latencies("DGX A100", "TF32")}
    assert plots.latency_over_work(groups, ax) is ax
    for drawn, line, cells in zip(dots(ax), lines(ax), groups.values(), strict=True):
        assert drawn.get_xdata().tolist() == [cell.FLOP / 1e12 for cell in cells]
        assert list(drawn.get_ydata()) == [cell.latency_ms for cell in cells]
        fit = two_numbers(cells)
        assert min(line.get_ydata()) == fit.floor_ms
        assert max(line.get_ydata()) == pytest.approx(fit.ms(max(cell.FLOP for cell in cells)))
        assert drawn.get_color() == line.get_color()
    assert dots(ax)[0].get_color() != dots(ax)[1].get_color()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[0] == "A100, FP16: 34.9 ms, 146 TFLOP/s"
    assert "var(--blue)" in as_svg(figure)


def test_float32_crosses_the_line_of_its_card():
    cells = published_latencies("DGX-1 16GB")
    _, ax = plots.canvas("Rates")
    plots.rate_over_batch(cells, ax, peaks={"FP32": 15.7})
    peak = next(line for line in ax.lines if line.get_linestyle() == "--")
    assert set(peak.get_ydata()) == {15.7} and peak.get_color() == PRECISIONS["FP32"]
    drawn = {line.get_label(): line for line in lines(ax)}
    assert {*drawn} == {f"{kind}, {s:g} s" for kind in ("FP32", "FP16") for s in (2, 7, 16.7)}
    longest = drawn["FP32, 16.7 s"]
    assert longest.get_xdata().tolist() == [1, 2, 4, 8, 16]
    assert min(longest.get_ydata()) < 15.7 < max(longest.get_ydata())
    (largest,) = [c for c in cells if (c.batch, c.seconds, c.precision) == (16, 16.7, "FP32")]
    assert longest.get_ydata()[-1] == largest.TFLOP_per_s
    with pytest.raises(ValueError, match=r"precision: expected one of FP32, .*, got \['FP8'\]"):
        plots.rate_over_batch(cells, ax, peaks={"FP8": 1.0})


def test_bars_are_the_peaks_and_cards_are_level_lines():
    memories = {
        "float32": TrainingMemory(fixed_GiB=2.0, utterance_GiB=0.5),
        "mixed": TrainingMemory(fixed_GiB=3.0, utterance_GiB=0.25),
    }
    _, ax = plots.canvas("Memory")
    plots.training_memory_bars(memories, (16, 32, 64), ax, cards={"16 GB": 16, "32 GB": 32})
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers[:2]}
    assert heights == {"float32": [10, 18, 34], "mixed": [7, 11, 19]}
    assert [line.get_ydata()[0] for line in ax.lines] == [16, 32]
    left, right = (bars[0] for bars in ax.containers[:2])
    assert left.get_x() + left.get_width() == pytest.approx(right.get_x())
    assert [text.get_text() for text in ax.texts][-2:] == ["16 GB", "32 GB"]
    with pytest.raises(ValueError, match="memories: expected keys of float32, mixed, got"):
        plots.training_memory_bars({"half": memories["mixed"]}, (16,), ax, cards={})


def test_each_seed_is_a_dot_and_the_reported_one_has_a_ring():
    runs = seed_runs(of="test-clean")
    figure, ax = plots.canvas("Seeds")
    plots.seed_dots(runs, ax)
    for row, run in enumerate(runs):
        seeds, mean, ring = ax.lines[3 * row : 3 * row + 3]
        assert list(seeds.get_xdata()) == list(run.percent)
        assert set(seeds.get_ydata()) == {row}
        assert set(mean.get_xdata()) == {np.mean(run.percent)}
        assert list(ring.get_xdata()) == [run.reported] and ring.get_mfc() == "none"
    ticks = [tick.get_text() for tick in ax.get_yticklabels()]
    assert ticks == ["test-clean, DGX A100", "test-clean, DGX-1 32GB"]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["a seed", "mean of the seeds", "reported"]
    assert "var(--red)" in as_svg(figure)


def test_the_staircase_has_a_square_a_branch_and_then_a_bar_a_block():
    channels = JasperConfig().branch_channels()
    _, axes = plots.canvas("Branches", columns=2)
    staircase, fused = plots.dense_branches(channels, axes)
    assert len(staircase.patches) == 55
    own = [one for one in staircase.patches if to_hex(one.get_facecolor()) == plots.COLOURS[0]]
    assert len(own) == 10
    assert all(one.get_x() == pytest.approx(one.get_y() + 1) for one in own)
    heights = {}
    for bar in fused.patches:
        block = round(bar.get_x() + bar.get_width() / 2)
        heights[block] = heights.get(block, 0) + bar.get_height()
    assert list(heights.values()) == [sum(sizes) for sizes in channels if sizes]
    assert staircase.get_title() == "55 convolutions of one frame"
    assert fused.get_title() == "fused: 10 products"
    with pytest.raises(ValueError, match="channels: expected a stage with branches at least"):
        plots.dense_branches([[], []], axes)
