"""Pictures of encoder-decoder models show the numbers that they are given."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from asrkit.workbench import plots
from asrkit.workbench.cost import aed_bytes
from asrkit.workbench.plots.aed import CELLS_A_ROW, WAY_COLOURS
from asrkit.workbench.plots.svg import as_svg


def test_each_part_of_a_step_has_its_cells_across_rows():
    parts = {"self-attention": 4, "feed-forward": 8, "projections of frames": 130}
    figure, ax = plots.canvas("Cells")
    assert plots.step_cells(parts, ax, rows=5) is ax
    cells = {}
    for patch in ax.patches:
        shade = to_hex(patch.get_facecolor())
        cells[shade] = cells.get(shade, 0) + round(patch.get_width())
        assert patch.get_x() + patch.get_width() <= CELLS_A_ROW
    assert cells == {plots.colour(name): count for name, count in parts.items()}
    assert {round(patch.get_y()) for patch in ax.patches} == {0, 1, 2}
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["self-attention: 4", "feed-forward: 8", "projections of frames: 130"]
    assert "var(--red)" in as_svg(figure)
    with pytest.raises(ValueError, match="parts: expected at most 50 cells, got 142"):
        plots.step_cells(parts, ax, rows=1)
    with pytest.raises(ValueError, match="parts: expected numbers of cells, 0 or more"):
        plots.step_cells({"steps": -1}, ax)


def test_models_share_a_scale_and_one_legend():
    rows = {"kept": {"encoder": 3.0, "steps": 2.0}, "again": {"encoder": 3.0, "steps": 7.0}}
    models = {"deep": rows, "shallow": {name: {"encoder": 4.0, "steps": 1.0} for name in rows}}
    _, axes = plots.canvas("Work", columns=2)
    left, right = plots.decoder_work(models, axes, unit="GFLOP")
    assert left.get_xlim() == right.get_xlim() and left.get_xlim()[1] > 10
    assert left.get_legend() is None and right.get_legend() is not None
    assert [text.get_text() for text in left.texts] == ["5", "10"]
    assert [ax.get_title() for ax in axes] == ["deep", "shallow"]
    with pytest.raises(ValueError, match="axes: expected 2 of them, one a model, got 1"):
        plots.decoder_work(models, axes[:1], unit="GFLOP")


def test_a_line_is_the_median_of_each_batch_and_a_dashed_one_the_operations():
    ratios = {
        "K/V kept": {1: [1.5, 1.8, 2.9], 8: [0.8, 0.9, 1.0]},
        "NeMo 3.0": {1: [2.0], 8: [3.0]},
    }
    _, ax = plots.canvas("Ratios")
    plots.deep_over_shallow(ratios, ax, operations={"K/V kept": 0.85})
    lines = {line.get_label(): line for line in ax.lines if line.get_marker() == "o"}
    assert list(lines["K/V kept"].get_ydata()) == [1.8, 0.9]
    assert list(lines["NeMo 3.0"].get_xdata()) == [1, 8]
    assert lines["NeMo 3.0"].get_color() == WAY_COLOURS["NeMo 3.0"]
    levels = {
        line.get_ydata()[0]: line.get_linestyle()
        for line in ax.lines[1:]
        if len(set(line.get_ydata())) == 1
    }
    assert levels[0.85] == "--" and levels[1] == "-"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "8"]


def test_rows_wait_for_the_last_one_and_a_draft_is_left_of_the_steps():
    _, (left, right) = plots.canvas("Steps", columns=2)
    plots.decoding_steps([5, 3, 1], left)
    widths = [[bar.get_width() for bar in bars] for bars in left.containers]
    assert widths == [[5, 3, 1], [0, 2, 4]]
    plots.decoding_steps([5, 5, 5], right, accepted=[4, 0, 2])
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in right.containers}
    assert widths["tokens of the draft, in the first step"] == [-4, 0, -2]
    assert widths["steps"] == [1, 5, 3] and widths["waiting"] == [4, 0, 2]
    with pytest.raises(ValueError, match="accepted: expected 0 to one less than the length"):
        plots.decoding_steps([5, 5], right, accepted=[5, 0])
    with pytest.raises(ValueError, match="accepted: expected 2 numbers, got 1"):
        plots.decoding_steps([5, 5], right, accepted=[1])


def test_the_floor_of_a_step_is_its_bytes_by_the_cards_rate():
    sizes = {"24 layers": {"D": 1024, "layers": 24, "V": 4128, "heads": 8}}
    _, ax = plots.canvas("Floor")
    plots.step_floor(sizes, (1, 128), ax, T=250, U=70, card="H100")
    drawn = {line.get_label(): np.array(line.get_ydata()) for line in ax.lines}
    step = aed_bytes(B=128, T=250, U=70, D=1024, layers=24, V=4128, cross="kept", past="kept")
    assert drawn["24 layers: weights"] == pytest.approx(step.weights_read / 3350e9 * 1e3)
    kept = drawn["24 layers: keys and values"]
    assert kept[1] == pytest.approx(step.kept / 3350e9 * 1e3) and kept[1] == 128 * kept[0]
    assert (drawn["24 layers: operations"] < kept).all()
    for card in ("A10", "H1000"):  # one without rates, and none
        with pytest.raises(ValueError, match=f"card: expected one of .*'H100'.*, got '{card}'"):
            plots.step_floor(sizes, (1,), ax, T=250, U=70, card=card)
    four = {str(number): sizes["24 layers"] for number in range(4)}
    with pytest.raises(ValueError, match="sizes: expected at most 3 models, .*, got 4"):
        plots.step_floor(four, (1,), ax, T=250, U=70, card="H100")
