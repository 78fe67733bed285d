"""The fused encoder with no GPU: against the eager one in float64, in Triton's interpreter, and compiled without a launch.

What this cannot show: speed, the rounding of real half-precision hardware, races. The interpreter is asked for float32 and float16:
it cuts bfloat16 off where a GPU rounds, and its tl.dot multiplies that dtype's bits as whole numbers. A test marked `gpu` runs
all three for real.
"""

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asrkit import runtime
from asrkit.models import (
    CTCConfig,
    CTCModel,
    FastConformer,
    FastConformerConfig,
    limit_context,
    optimize,
)
from asrkit.models import fused as ours
from asrkit.models.fused import FusedFastConformer, float8, fuse, reference
from asrkit.workbench.bench.ceilings import tf32

SMALL = FastConformerConfig(width=16, layers=2, heads=2, subsampling=4, subsampling_channels=4)
KERNELS = (
    "add_norm",
    "add_norm_twice",
    "gated_conv",
    "position_bias",
    "first_convs",
    "masked_conv",
)
CONFIGS = [
    {}, {"subsampling": 8, "bins": 41}, {"subsampling": 2, "context": (2, 1)}, {"bias": False, "scale_input": True, "kernel": 3},
    {"context": (-1, 3)}, {"layers": 0, "subsampling": 8}, {"layers": 1, "subsampling": 8, "context": (4, 4)},
]  # fmt: skip


def build(**changes):
    """An encoder in eval mode in which no bias is zero and no statistic at its first value."""
    torch.manual_seed(0)
    encoder = FastConformer(dataclasses.replace(SMALL, **changes))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for block in encoder.blocks:
            block.batch_norm.running_mean.normal_()
            block.batch_norm.running_var.uniform_(0.5, 2)
    return encoder.eval()


def speech(T, bins=80, dtype=torch.float32):
    """Features with NaN in the padding, and lengths down to one frame."""
    features, lengths = torch.randn(3, T, bins, dtype=dtype), torch.tensor([T, (T + 1) // 2, 1])
    for b, length in enumerate(lengths.tolist()):
        features[b, length:] = float("nan")
    return features, lengths


@pytest.mark.parametrize("T", [1, 7, 128, 200])
@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_a_fused_encoder_equals_the_eager_one_in_float64(changes, T):
    plain = build(**changes).double()
    features, lengths = speech(T, plain.config.bins, torch.float64)
    with torch.inference_mode():
        wanted, ends = plain(features, lengths)
        fast = fuse(plain)
        for _ in range(2):  # what is kept is used the second time
            found, its = fast(features, lengths)
            assert torch.equal(its, ends) and found.is_contiguous()
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_errs_at_most_twice_as_much_as_the_eager_one_in_the_same_dtype(dtype):
    plain, (features, lengths) = build(subsampling=8), speech(300)
    with torch.inference_mode():
        exact = copy.deepcopy(plain).double()(features.double(), lengths)[0]
        plain = plain.to(dtype)
        found = fuse(plain)(features, lengths)[0]
        unfused = plain(features, lengths)[0]
    assert found.dtype == unfused.dtype == dtype
    error, limit = ((one.double() - exact).norm() for one in (found, unfused))
    assert error <= 2 * limit + 1e-9


def test_inside_it_attends_over_whole_sixteens_of_frames(monkeypatch):
    seen, plain = [], ours.position_bias
    monkeypatch.setattr(
        ours,
        "position_bias",
        lambda scores, *rest: seen.append(scores.shape) or plain(scores, *rest),
    )
    for T in (8, 128, 129, 1000):
        found, _ = fuse(build(subsampling=8))(torch.randn(1, T, 80), torch.tensor([T]))
        assert found.shape[1] == -(-T // 8) and {shape[-1] for shape in seen} == {-(-T // 128) * 16}
        seen.clear()


def test_positions_of_a_limited_context_are_masked_as_in_the_eager_one():
    scores, constant, lengths = torch.zeros(1, 1, 4, 4), torch.arange(8.0)[None], torch.tensor([3])
    bias = reference.position_bias(scores, constant, lengths, 1, 4)[0, 0]
    never = torch.finfo(torch.float32).min / 2
    assert bias.tolist() == [
        [4, 5, 6, never],
        [3, 4, 5, never],
        [never, 3, 4, never],
        [never, never, 3, never],
    ]


def test_a_fused_encoder_refuses_training_and_what_cannot_be_fused():
    encoder = fuse(build())
    with pytest.raises(ValueError, match="^encoder: expected eval mode, got training mode"):
        encoder.train()(*speech(20))
    with pytest.raises(ValueError, match="^encoder: expected eval mode, got training mode"):
        fuse(build().train())
    with pytest.raises(ValueError, match="^encoder: expected a FastConformer, got Linear"):
        fuse(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"^features: expected shape \(B, T, F=80\)"):
        encoder.eval()(torch.zeros(1, 5, 40), torch.tensor([5]))
    with pytest.raises(
        ValueError, match="^model: expected one with a FastConformer, got FusedFastConformer"
    ):
        limit_context(encoder, (1, 1))


def test_on_cuda_a_model_gets_a_fused_encoder_and_float64_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("cuda"):
        model = CTCModel(CTCConfig(vocab_size=8, encoder=SMALL)).eval()
        assert optimize(model) is model and type(model.encoder) is FusedFastConformer
        assert model(torch.zeros(2, 100, 80), torch.full((2,), 100))[0].shape == (2, 25, 9)
        assert type(optimize(FastConformer(SMALL).eval())) is FusedFastConformer
        torch.set_default_dtype(torch.float64)
        try:
            with pytest.raises(
                ValueError,
                match="^encoder: expected float32, bfloat16 or float16 on CUDA, got torch.float64",
            ):
                fuse(FastConformer(SMALL).eval())
        finally:
            torch.set_default_dtype(torch.float32)


def test_on_cuda_a_triton_that_is_there_and_broken_is_named_by_fuse(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def broken(name):
        raise RuntimeError("built for another driver")

    monkeypatch.setattr(runtime, "import_module", broken)
    runtime.lacks.cache_clear()
    said = "^encoder: expected a triton that works, on a CUDA device, got RuntimeError: built for another driver"
    with FakeTensorMode(), torch.device("cuda"), pytest.raises(ValueError, match=said):
        fuse(FastConformer(SMALL).eval())
    runtime.lacks.cache_clear()


@pytest.mark.parametrize("name", [*KERNELS, "quantize", "silu_quantize"])
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch, name):
    pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from asrkit.models.fused import triton as kernels

    current, launched_on = [0], []

    def exchange(index):
        before, current[0] = current[0], index if index >= 0 else current[0]
        return before

    for setter in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, setter, exchange)
    monkeypatch.setattr(kernels, name, lambda x: launched_on.append((x.device.index, *current)))
    with FakeTensorMode():
        ours._launch(name, torch.empty(1, device="cuda:1"))
    assert launched_on == [(1, 1)] and current == [0]


def given(dtype, device):
    """Arguments of every kernel at odd sizes, and with NaN in the padding."""
    torch.manual_seed(0)
    B, T, D, H, C = 3, 33, 20, 2, 12
    lengths = torch.tensor([T, 20, 1])
    x, y, vectors = torch.randn(B, T, D), torch.randn(B, T, D), torch.randn(4, D)
    gate, weight, bias = torch.randn(B, T, 2 * D), torch.randn(5, D), torch.randn(D)
    features, image = torch.randn(B, T, 9), torch.randn(B, 24, 5, C)
    for b, length in enumerate(lengths.tolist()):
        for tensor, end in ((gate, length), (features, length), (image, (length + 1) // 2)):
            tensor[b, end:] = float("nan")
    scores = (
        torch.randn(H, B, T, 2 * T)
        .to(device, dtype)
        .flatten(-2)[..., T:]
        .view(H, B, T, 2 * T - 1)[..., :T]
    )
    first = torch.cat([torch.randn(10, C), torch.zeros(6, C)])
    halves, taps, shift = (lengths + 1) // 2, torch.randn(9, C), torch.randn(C)
    x, y, vectors, gate, image, first = (
        part.to(device, dtype) for part in (x, y, vectors, gate, image, first)
    )
    rest = (lengths, halves, weight, bias, features, taps, shift, torch.randn(H, 2 * T))
    lengths, halves, weight, bias, features, taps, shift, constant = (
        part.to(device) for part in rest
    )
    yield "add_norm", (x, y, 0.5, vectors[0], vectors[1], 1e-5)
    yield "add_norm_twice", (x, y, 1.0, vectors[0], vectors[1], 1e-5, vectors[2], vectors[3], 1e-5)
    yield "gated_conv", (gate, lengths, weight, bias)
    yield "position_bias", (scores, constant, lengths, T, T)
    yield "position_bias", (scores, constant, lengths, 3, 0)
    yield "first_convs", (features, lengths, 12, first, taps, shift)
    yield "masked_conv", (image, halves, 12, taps, shift)


def _quantizes(name, kernels, dtype, device):
    """Whether kernel and reference give the same scales, and the same values but for neighbours where both are as near.

    The interpreter loses the carry where a number is rounded up to a power of two, so that half of it is left.
    """
    x = (torch.randn(3, 5, 40) * torch.tensor([1e-3, 1.0, 30.0])[:, None, None]).to(device, dtype)
    x[0, 0] = 0
    (values, scale), (wanted, its) = getattr(kernels, name)(x), getattr(float8, name)(x)
    values, wanted = values.float(), wanted.float()
    near = (values - wanted).abs() <= (wanted.abs() / 8).clamp(
        min=2**-9
    )  # the step of the smallest numbers
    near |= torch.tensor(device == "cpu") & (values == wanted / 2) & (wanted.abs().log2() % 1 == 0)
    same = (values == wanted).float().mean() > 0.9
    return bool(same and near.all() and (scale - its).abs().max() <= 1e-5 * its.max())


def disagreements(device, *dtypes):
    """Kernels that are further from the reference than the dtype explains, and encoders made of kernels that are."""
    from asrkit.models.fused import triton as kernels

    limits, found = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}, []
    for dtype in dtypes:
        found += [
            (name, dtype)
            for name in ("quantize", "silu_quantize")
            if not _quantizes(name, kernels, dtype, device)
        ]
        for name, arguments in given(dtype, device):
            sides = [getattr(module, name)(*arguments) for module in (kernels, reference)]
            ones, others = (side if isinstance(side, tuple) else (side,) for side in sides)
            for one, other in zip(ones, others, strict=True):
                alike = (
                    one.dtype == other.dtype == dtype
                    and one.shape == other.shape
                    and one.is_contiguous()
                )
                if (
                    not alike
                    or not (one - other).double().norm() <= limits[dtype] * other.double().norm()
                ):
                    found.append((name, dtype, one.shape, other.shape, one.dtype, other.dtype))
    for name in KERNELS:
        setattr(ours, name, getattr(kernels, name))
    plain, (features, lengths) = build(subsampling=8, bins=9, layers=1).to(device), speech(20, 9)
    wanted, out = (
        model(features.to(device), lengths.to(device))[0] for model in (plain, fuse(plain))
    )
    return found if (out - wanted).norm() <= 1e-5 * wanted.norm() else [*found, "encoder"]


def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); from {here.stem} import *"
    code += "; found = disagreements('cpu', torch.float32, torch.float16)"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"{code}; assert not found, found"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_kernels_agree_with_the_reference_on_a_gpu(monkeypatch):
    for name in KERNELS:
        monkeypatch.setattr(ours, name, getattr(ours, name))  # put back afterwards
    with tf32(False):  # cuDNN's convolutions, in the reference, take it where nobody says so
        assert not disagreements("cuda", torch.float32, torch.float16, torch.bfloat16)


SIZES = {  # as in a model of width 1024; what each kernel's launch passes for tl.constexpr, and its warps
    "_add_norm": (4, {"TWICE": True, "BLOCK": 1024}),
    "_gated_conv": (2, {"K": 9, "CHUNK": 32, "BLOCK": 256}),
    "_position_bias": (4, {"ROWS": 16, "COLUMNS": 128}),
    "_first_convs": (8, {"EXACT": True, "ROWS": 64, "BLOCK": 128}),
    "_masked_conv": (4, {"ROWS": 8, "BLOCK": 256}),
    "_quantize": (4, {"SILU": True, "BLOCK": 4096}),
}
FLOATS, LONGS = (
    {"scale", "eps", "next_eps", "never", "largest", "tiny"},
    {"by_head", "by_utterance"},
)
POINTERS = {
    "lengths": "*i64",
    "features": "*fp32",
    "constant": "*fp32",
    "taps": "*fp32",
    "shift": "*fp32",
}  # the rest is as x
INTEGERS = {"T", "D", "C", "bins", "frames", "out_bins", "left", "right", "by_row"}


@pytest.mark.parametrize("cc, kind", [(80, "*bf16"), (90, "*bf16"), (100, "*bf16"), (90, "*fp32")])
def test_kernels_compile_for_every_gpu_without_spills_and_with_warps_to_hide_behind(cc, kind):
    pytest.importorskip("triton")
    from asrkit.models.fused import triton as kernels
    from asrkit.workbench.profiling.cubin import compile_triton

    for name, (warps, constants) in SIZES.items():
        if name == "_quantize" and cc == 80:
            continue  # has no e4m3
        kernel, types = getattr(kernels, name), dict(constants)
        for argument in set(kernel.arg_names) - constants.keys():
            numbers = ("fp32", FLOATS), ("i64", LONGS), ("i32", INTEGERS)
            types[argument] = next(
                (one for one, names in numbers if argument in names), POINTERS.get(argument, kind)
            )
        if name == "_quantize":
            types |= {"out": "*fp8e4nv", "scales": "*fp32"}
        whole = [
            argument
            for argument, one in types.items()
            if str(one).startswith("*") or argument in ("D", "C", "T", "frames")
        ]
        made = compile_triton(kernel, types, cc=cc, warps=warps, aligned=whole)
        assert (made.spills, made.stack_B) == (0, 0), made
        assert made.warps >= (16 if kind == "*bf16" else 8), (name, made.warps)
