"""The suite of encoder-decoder models: greedy decoding by attention.

Texts are planted (asrkit.workbench.bench.planted_attention): V = 1024 tokens, a width of D = 256,
12.5 frames and 3.5 labels a second. Decoders of 12, 6 and 2 layers are timed alone, by what they
keep of frames and text, and with drafts of a CTC head that mishears a share of the labels. Least
work: the bytes that all steps read, of weights, of what is kept of the frames, and of the text so
far, for the utterances that have not ended.

What moving layers from the decoder to the encoder is worth, the suite of claims measures.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.decoders import Hypotheses, aed_greedy, ctc_draft, ctc_greedy
from asrkit.models import optimize
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.bench.planted_attention import (
    PlantedDecoder,
    PlantedText,
    ctc_text,
    planted_decoder,
    planted_text,
)
from asrkit.workbench.measure import launch_profile
from asrkit.workbench.measure.ops import dtype_name

Options = dict[str, Any]  # of aed_greedy
WHAT = "aed-greedy"
BEST = ("kept", "absorbed")
WAYS: dict[str, Options] = {
    "kept": {},
    "absorbed": {"cross": "absorbed"},
    "recomputed": {"cross": "recomputed", "past": "states"},  # as NeMo 3.0
}
SLOW_WAYS: dict[str, Options] = {
    "states": {"past": "states"},
    "nothing_kept": {"cross": "recomputed", "past": "none"},
}
ERRORS = (0, 5, 20)  # per cent of the labels that the CTC head hears as others


class Plans(NamedTuple):
    """Sizes of batches: utterances, and frames of the longest."""

    decoders: Sequence[int]  # layers
    sizes: Sequence[tuple[int, int]]
    slow: tuple[int, int]  # with the ways of SLOW_WAYS, for the smallest decoder
    model: dict[str, Any]  # sizes of the decoder that differ from the default ones


FULL = Plans(
    decoders=(12, 6, 2),
    sizes=((1, 250), (8, 250), (32, 62)),
    slow=(1, 125),
    model={},
)
QUICK = Plans(
    decoders=(2,),
    sizes=((3, 40),),
    slow=(2, 24),
    model={"V": 33, "width": 112, "heads": 2, "most": 64},
)


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield decoding by layers and sizes.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes.
    """
    plans = QUICK if quick else FULL
    for layers in plans.decoders:
        decoder = planted_decoder(layers=layers, **plans.model)
        for B, T in plans.sizes:
            yield decoding(decoder, B, T, WAYS, device, quick)
        if layers == plans.decoders[-1]:
            yield decoding(decoder, *plans.slow, WAYS | SLOW_WAYS, device, quick)


def decoding(
    decoder: PlantedDecoder,
    B: int,
    T: int,
    ways: Mapping[str, Options],
    device: str,
    quick: bool,
) -> Case:
    """One case of all ways to decode a batch, with drafts, and on a CPU with packed weights; on a
    GPU in bfloat16.

    Args:
        decoder: to decode with.
        B: utterances.
        T: frames of the longest.
        ways: options of aed_greedy by name; "kept" comes first.
        device: "cpu" or "cuda".
        quick: take the ceilings at small sizes.
    """
    cuda = device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    plan = planted_text(decoder, B, T).to(device, dtype)
    arms: dict[str, Arm] = {}
    params: dict[str, dict[str, Any]] = {}
    for name, arm in arms_of(plan, ways, cuda).items():
        try:
            params[name] = arm_params(arm, device, quick)
        except (ValueError, RuntimeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        arms[name] = arm
    return Case(
        what=WHAT,
        arms=arms if "kept" in arms else {},
        params=shared_params(plan, dtype),
        arm_params=params,
        ratios=ratios_of(arms),
        warmup=0,
        tolerance=0.1 if cuda else 1e-3,  # of scores that are sums of many logarithms
    )


@dataclass(frozen=True)
class Arm:
    """A call that decodes a plan."""

    plan: PlantedText
    model: Any  # of the plan, or with packed weights
    options: Options
    ctc: Tensor | None = None  # log-probabilities of a CTC head, whose text is verified

    def __call__(self) -> Hypotheses:
        return self.decode(self.model)

    def decode(self, model: Any) -> Hypotheses:
        """Greedy hypotheses; the draft is made in the same time.

        Args:
            model: stands for the arm's own.
        """
        plan = self.plan
        options = {"prompt": plan.prompt, **self.options}
        if self.ctc is not None:
            options["draft"] = ctc_draft(plan.model, ctc_greedy(self.ctc, plan.lengths))
        return aed_greedy(model, plan.encoded, plan.lengths, **options)

    def follows(self) -> int:
        """Calls of the decoder.

        Whatever decoding raises goes on.

        Raises:
            AssertionError: the labels are not those that were planted.
        """
        model = Counting(self.model)
        found = self.decode(model)
        assert found.tokens() == self.plan.labels, "other labels than were planted"
        return model.follows


class Counting:
    """A model that counts the calls of its decoder."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.follows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def follow(self, *arguments: Any, **options: Any) -> Any:
        """The model's logits and state."""
        self.follows += 1
        return self.model.follow(*arguments, **options)


def arms_of(plan: PlantedText, ways: Mapping[str, Options], cuda: bool) -> dict[str, Arm]:
    """An arm for each way, each draft, and the machine's own forms of the best ways."""
    arms = {name: Arm(plan, plan.model, options) for name, options in ways.items()}
    if not cuda:
        packed = optimize(deepcopy(plan.model))
        for name in BEST:
            arms[f"{name}_packed"] = Arm(plan, packed, ways[name])
    for per_cent in ERRORS:
        ctc = ctc_text(plan, per_cent / 100).to(plan.encoded.device)
        arms[f"draft_{per_cent}"] = Arm(plan, plan.model, {}, ctc)
    return arms


def arm_params(arm: Arm, device: str, quick: bool) -> dict[str, Any]:
    """Calls of the decoder, and where no draft decides how much there is, ops and least work.

    Args:
        arm: is called once or twice.
        device: whose ceilings are taken.
        quick: take them at small sizes.
    """
    calls = {"follow": arm.follows()}
    if arm.ctc is not None:
        return calls
    calls["launches"] = launch_profile(arm, device=device, runtime=False).launches
    floor_B = least_bytes(arm.plan, arm.options)
    peak_B = ceilings(device, quick).bytes_per_s
    return calls | {"floor_B": floor_B, "least_ms": 1e3 * floor_B / peak_B, "peak_B": peak_B}


def shared_params(plan: PlantedText, dtype: torch.dtype) -> dict[str, Any]:
    """Params of all arms: shape, seconds, labels."""
    B, T, D = plan.encoded.shape
    config = plan.model.config
    return {
        "shape": [B, T, D, config.layers],
        "dtype": dtype_name(dtype),
        "vocab_size": config.vocab_size,
        "labels": sum(map(len, plan.labels)),
        "steps": plan.steps(),
        "audio_s": int(plan.lengths.sum()) / 12.5,
        "weights": "planted",
    }


def ratios_of(arms: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(slow, fast) pairs: all ways against the kept one, drafts and packed weights over theirs."""
    pairs = [(name, "kept") for name in (*SLOW_WAYS, "recomputed", "absorbed")]
    pairs += [("kept", f"draft_{per_cent}") for per_cent in ERRORS]
    pairs += [(name, f"{name}_packed") for name in BEST]
    return [pair for pair in pairs if arms.keys() >= {*pair}]


def least_bytes(plan: PlantedText, options: Options) -> int:
    """Bytes that all steps of a way read at least, of weights, frames and text so far.

    What several layers read alike counts once a step, and so do weights, however many utterances
    there are; an utterance that has ended counts no more.

    Args:
        plan: batch and model.
        options: `cross` and `past` of aed_greedy.
    """
    config = plan.model.config
    L, D = config.layers, config.width
    kept = options.get("cross", "kept") == "kept"
    of_frame = 2 * L * D if kept else D
    of_token = {"kept": 2 * L * D, "states": L * D, "none": 0}[options.get("past", "kept")]
    weights = decoder_weights(plan.model, keys_values=not kept)
    P = len(plan.prompt)
    numbers = weights * plan.steps()
    for labels, length in zip(plan.labels, plan.lengths.tolist(), strict=True):
        steps = len(labels) + 1
        numbers += steps * of_frame * length
        numbers += of_token * sum(range(P, P + steps))
    return numbers * plan.encoded.itemsize


def decoder_weights(model: nn.Module, *, keys_values: bool) -> int:
    """Parameters that a step reads, of all layers and the output.

    Args:
        model: an AEDModel.
        keys_values: whether the projections of frames are among them.
    """
    total = 0
    for name, weight in model.named_parameters():
        used = name.startswith(("layers.", "norm.", "embedding.", "output_bias"))
        if used and (keys_values or ".key_value." not in name):
            total += weight.numel()
    return total


SUITE = Suite(name="aed", cases=suite, gpu_tests=("tests/decoders/test_graphs_gpu.py",))
