"""What a check of a loss vouches for: the arms that compute what it proves, and no others."""

import re

import pytest

from asrkit.workbench.bench.checks import losses as loss_checks
from asrkit.workbench.bench.suites import losses

ARMS = {
    *losses.joint_arms(*losses.joint_inputs((1, 2, 2, 2, 2), "cpu")),
    "lean_triton",
    "lean_triton_bfloat16",
    losses.SMALL_TILE,
}
ARMS |= {"torchaudio_bfloat16"}
ARMS |= {
    "wavefront",
    "numba_cuda",
    "numba_cuda_overwrite",
    "rnnt-loss",
    "rnnt-loss-ragged",
    "tdt-loss",
}
HALVED = {"lean_bfloat16", "lean_skip_bfloat16"}


def left_out(name):
    """Arms and cases that are gone where the check of this name fails on a GPU."""
    table = [*loss_checks.kernels("cuda", True), *loss_checks.tiles("cuda", True)]
    (check,) = [check for check in table if check.name == name]
    return {arm for arm in ARMS if check.vouches and re.search(check.vouches, arm)}


@pytest.mark.parametrize(
    "name, arms",
    [
        (
            "rnnt_loss numba_cuda float32 3×6×4×9",
            {"numba_cuda", "numba_cuda_overwrite", "rnnt-loss-ragged"},
        ),
        ("rnnt_loss numba_cuda float32 3×6×4×9 in place", {"numba_cuda_overwrite"}),
        ("rnnt_loss numba_cuda float32 3×6×4×9 options", set()),
        ("tdt_loss numba_cuda float32 3×6×4×9", {"tdt-loss"}),
        ("rnnt_loss wavefront float32 3×6×4×9 in place", set()),
        ("lean plain tanh float32 dropout 0.0 durations []", {"lean", "lean_skip"}),
        ("lean plain tanh bfloat16 dropout 0.0 durations []", HALVED),
        ("lean plain tanh float32 dropout 0.3 durations []", set()),
        ("lean plain relu float32 dropout 0.0 durations []", set()),
        ("lean plain tanh float32 dropout 0.0 durations [0, 2]", set()),
        ("lean plain tanh float16 dropout 0.0 durations []", set()),
        ("lean triton tanh float32 dropout 0.0 durations []", {"lean_triton"}),
        (
            "lean triton tanh bfloat16 dropout 0.0 durations []",
            {"lean_triton_bfloat16", losses.SMALL_TILE},
        ),
        ("lean triton float32 2×9×5×640×1025", {"lean_triton"}),
        ("lean triton bfloat16 2×9×5×640×1025", {"lean_triton_bfloat16", losses.SMALL_TILE}),
        (
            "rnnt_loss torchaudio float32",
            {"torchaudio", "torchaudio_flushed", "torchaudio_bfloat16"},
        ),
        ("lean plain skips", {"lean_skip", "lean_skip_bfloat16"}),
        ("lean triton skips", set()),
    ],
)
def test_a_check_that_fails_takes_along_what_it_proves_and_nothing_else(name, arms):
    assert left_out(name) == arms
