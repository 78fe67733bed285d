"""Times what must not get slower in two checkouts of asrkit, in turns, and prints the ratios.

    git worktree add build/before 083212e
    python tests/before_after.py build/before .

Each checkout has a process of its own, which is asked for one round at a time, so that noise of the
machine meets both alike; times are CPU seconds on one thread, medians over the rounds, beside the
peak of tensor memory in one. Both also say what they computed: a result that differs is
printed, and the exit code is 1. Only doors of the library are used, no part of the workbench. The
README's results come first, then a training step, attention decoding and loading.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROUNDS = 5
Answer = tuple[float, str]  # CPU seconds, and what was computed


def digest(*values: object) -> str:
    """A short name for values that have to be the same in both checkouts."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


def loss(overwrite: bool) -> Callable[[], Answer]:
    """RNN-T forward and backward, logits of shape (4, 200, 101, 1024), float32."""
    import torch

    from asrkit.losses import rnnt_loss

    generator = torch.Generator().manual_seed(0)
    given = torch.randn(4, 200, 101, 1024, generator=generator)
    targets = torch.randint(0, 1023, (4, 100), generator=generator)
    frames = torch.full((4,), 200)
    labels = torch.full((4,), 100)

    def run() -> Answer:
        logits = given.clone().requires_grad_()
        joint = logits * 1  # the output of a joint may be overwritten, a leaf may not
        began = time.process_time()
        found = rnnt_loss(joint, targets, frames, labels, overwrite_logits=overwrite)
        (gradient,) = torch.autograd.grad(found, joint)
        seconds = time.process_time() - began
        return seconds, digest(
            round(found.item(), 2), round(gradient.abs().sum().item(), 1)
        )

    return run


def decoding(durations: tuple[int, ...]) -> Callable[[], Answer]:
    """Greedy, LSTM predictor, 32 utterances of 15 to 30 s, about 3.5 labels a second."""
    import torch

    from asrkit.decoders import transducer_greedy
    from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel

    torch.manual_seed(0)
    config = TransducerConfig(
        vocab_size=1024,
        predictor=LSTMConfig(width=640),
        joint_width=640,
        durations=durations,
    )
    model = TransducerModel(config).eval().requires_grad_(False)
    encoded = 4 * torch.randn(32, 375, 640)
    lengths = torch.linspace(375, 187, 32).long()
    wanted = 3.5 * lengths.sum().item() / 12.5
    low, high = -8.0, 8.0  # of the blank's bias, by bisection
    for _ in range(10):
        model.output.bias[model.blank] = (low + high) / 2
        said = sum(map(len, transducer_greedy(model, encoded, lengths).labels))
        low, high = (
            ((low + high) / 2, high) if said > wanted else (low, (low + high) / 2)
        )

    def run() -> Answer:
        began = time.process_time()
        found = transducer_greedy(model, encoded, lengths)
        return time.process_time() - began, digest(found.labels)

    return run


def encoder(arithmetic: str) -> Callable[[], Answer]:
    """FastConformer of 110M weights, one recording of 10 s, optimized."""
    import torch

    from asrkit.models import FastConformer, optimize, presets

    torch.manual_seed(0)
    dtype = torch.float32 if arithmetic == "float32" else torch.bfloat16
    model = (
        FastConformer(presets.tdt_ctc_110m().encoder)
        .eval()
        .requires_grad_(False)
        .to(dtype)
    )
    choice = {"linear_layers": "int8"} if arithmetic == "int8" else {}
    model = optimize(model, **choice)
    features = torch.randn(1, 1000, 80).to(dtype)
    lengths = torch.tensor([1000])

    def run() -> Answer:
        began = time.process_time()
        with torch.no_grad():
            found, _ = model(features, lengths)
        return time.process_time() - began, digest(
            round(found.double().abs().mean().item(), 4)
        )

    return run


def batching() -> Callable[[], Answer]:
    """Useful share of the compute, Balanced, 8 ranks, 150,000 lengths; timed is the plan."""
    from asrkit import data

    lengths = data.web_like(150_000)
    memory = data.Limit(data.CANARY_MEMORY, 1.0)
    strategy = data.Balanced(limit=memory, work=data.CANARY_COMPUTE)

    def run() -> Answer:
        began = time.process_time()
        made = data.plan(strategy, lengths, ranks=8)
        seconds = time.process_time() - began
        account = data.padding_account(
            made.pairs(lengths), cost=data.CANARY_COMPUTE, limit=memory, ranks=8
        )
        return seconds, f"{100 * account.utilisation:.2f} % useful"

    return run


def training(durations: tuple[int, ...]) -> Callable[[], Answer]:
    """A step over 8 utterances of 8 s with 30 labels: forward, backward and AdamW."""
    import torch

    from asrkit.models import FastConformerConfig, TransducerConfig, TransducerModel
    from asrkit.training import TrainConfig, training_step

    torch.manual_seed(0)
    encoder = FastConformerConfig(layers=4, width=256)
    config = TransducerConfig(vocab_size=1024, encoder=encoder, durations=durations)
    model = TransducerModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = training_step(model, optimizer, TrainConfig())

    def run() -> Answer:
        torch.manual_seed(1)
        began = time.process_time()
        step(8, 8.0, 30)
        return time.process_time() - began, ""

    return run


def attention(width: int) -> Callable[[], Answer]:
    """Canary's decoder of 4 layers with random weights, 8 utterances, 60 tokens each."""
    from inspect import signature

    import torch

    from asrkit.decoders import aed_beam, aed_greedy
    from asrkit.models import AEDModel, presets

    torch.manual_seed(0)
    config = presets.canary_180m_flash()
    model = AEDModel(config).eval().requires_grad_(False)
    encoded = torch.randn(8, 125, config.width)
    lengths = torch.linspace(125, 60, 8).long()
    names = signature(aed_greedy).parameters
    limit = {"max_labels" if "max_labels" in names else "most": 60}  # before 0.4

    def run() -> Answer:
        began = time.process_time()
        if width > 1:
            found = aed_beam(model, encoded, lengths, width=width, **limit)
        else:
            found = aed_greedy(model, encoded, lengths, **limit)
        return time.process_time() - began, digest(found.labels)

    return run


def loading() -> Callable[[], Answer]:
    """`load_checkpoint` of a recogniser of 110M weights in asrkit's own format."""
    import torch

    from asrkit.models import (
        Checkpoint,
        load_checkpoint,
        make_model,
        presets,
        save_checkpoint,
    )
    from asrkit.text import CharTokenizer

    torch.manual_seed(0)
    characters = "".join(map(chr, range(0x4E00, 0x4E00 + 1024)))
    model = make_model(presets.tdt_ctc_110m(len(characters)))
    checkpoint = Checkpoint(model, CharTokenizer(characters), {}, {})
    folder = TemporaryDirectory()
    path = Path(folder.name) / "model.safetensors"
    save_checkpoint(path, checkpoint)

    def run() -> Answer:
        assert folder.name in str(path)  # keeps the folder as long as this is asked
        began = time.process_time()
        found = load_checkpoint(path)
        seconds = time.process_time() - began
        weights = sum(
            weight.double().sum().item() for weight in found.model.parameters()
        )
        return seconds, digest(round(weights, 3))

    return run


RESULTS = {
    "loss, overwriting": lambda: loss(True),
    "loss": lambda: loss(False),
    "decoding, RNN-T": lambda: decoding(()),
    "decoding, TDT": lambda: decoding((0, 1, 2, 3, 4)),
    "encoder, int8": lambda: encoder("int8"),
    "encoder, bfloat16": lambda: encoder("bfloat16"),
    "encoder, float32": lambda: encoder("float32"),
    "batching, plan": batching,
    "training step, RNN-T": lambda: training(()),
    "training step, TDT": lambda: training((0, 1, 2, 3, 4)),
    "attention, greedy": lambda: attention(1),
    "attention, beam of 4": lambda: attention(4),
    "loading 110M weights": loading,
}


def work() -> None:
    """Runs what the lines of stdin name, a warm one first, and answers each in a line."""
    import torch

    from asrkit.workbench.measure import peak_memory

    torch.set_num_threads(1)
    prepared: dict[str, Callable[[], Answer]] = {}
    peak_mib: dict[str, float] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in prepared:
            prepared.clear()  # one result at a time in memory
            prepared[name] = RESULTS[name]()
            prepared[name]()
            peak_mib[name] = peak_memory(prepared[name]) / 2**20
        print(json.dumps((*prepared[name](), peak_mib[name])), flush=True)


def start(tree: Path) -> subprocess.Popen:
    """A process that computes with the asrkit of `tree`."""
    environment = os.environ | {
        "PYTHONPATH": str(tree.resolve()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        text=True,
        bufsize=1,
    )


def ask(process: subprocess.Popen, name: str) -> tuple[float, str, float]:
    """CPU seconds of one round, what it computed, and the peak of memory in MiB."""
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(
            f"before_after: the process of {process.args} ended; its error stands above"
        )
    seconds, computed, mib = json.loads(answer)
    return seconds, computed, mib


def main() -> int:
    """Compares, prints a row a result, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout of asrkit")
    parser.add_argument("after", type=Path, help="another")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of each result (%(default)s)"
    )
    parser.add_argument("--only", default="", help="results whose names contain this")
    options = parser.parse_args()
    for tree in (options.before, options.after):
        if not (tree / "asrkit" / "__init__.py").exists():
            parser.error(
                f"{tree}: expected a checkout of asrkit, found no asrkit/__init__.py"
            )
    processes = [start(options.before), start(options.after)]
    differ = 0
    print(
        f"{'CPU seconds, one thread':26}{'before':>9}{'after':>9}{'after/before':>14}"
        f"{'MiB before':>13}{'after':>8}"
    )
    for name in [name for name in RESULTS if options.only in name]:
        rounds = [
            [ask(process, name) for process in processes] for _ in range(options.rounds)
        ]
        before, after = (median(one[side][0] for one in rounds) for side in (0, 1))
        mib = [rounds[0][side][2] for side in (0, 1)]
        computed = {one[side][1] for one in rounds for side in (0, 1)}
        differ += len(computed) > 1
        same = (
            f"both {computed.pop()}" if len(computed) == 1 else f"DIFFERENT: {computed}"
        )
        print(
            f"{name:26}{before:9.4f}{after:9.4f}{after / before:14.3f}"
            f"{mib[0]:13.1f}{mib[1]:8.1f}   {same}",
            flush=True,
        )
    return 1 if differ else 0


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work()
    else:
        sys.exit(main())
