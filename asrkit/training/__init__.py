"""Training a transducer: AdamW on a one-cycle schedule, EMA weights, and checkpoints that survive
kill -9.

A run lives in one folder: `log.jsonl` (a line a step), `state.pt` (to resume), `model.safetensors`
(EMA weights, to use). Augmentation and dropout follow from (seed, step). Where `steps` ends the
run, so do batches and rate, and on a CPU a resumed run repeats the losses of an unbroken one; where
`seconds` does, rate and curriculum follow the clock.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from asrkit.data import (
    AugmentConfig,
    Batch,
    Utterances,
    augment,
    batches,
    spec_augment,
    training_stream,
)
from asrkit.features import FeatureConfig, log_mel
from asrkit.files import atomic, content_hash
from asrkit.losses import rnnt_loss, tdt_loss
from asrkit.models import Checkpoint, TransducerConfig, TransducerModel, save_checkpoint
from asrkit.models.checkpoints import config_to_dict
from asrkit.runtime import usable_cores
from asrkit.shapes import expect
from asrkit.text import ErrorRate, Tokenizer, dump_tokenizer, normalize_text, wer
from asrkit.transcribe import recognize


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The run ends at `steps` or after `seconds` of training, whichever comes first."""

    steps: int = 100_000
    seconds: float = 300.0
    batch_seconds: float = (
        12.0  # small batches: on a CPU the number of steps decides, not their size
    )
    peak_lr: float = 5e-3
    warmup: float = 0.05  # share of the run in which the rate climbs
    weight_decay: float = 0.01
    clip: float = 5.0  # largest gradient norm
    ctc_weight: float = 0.3
    sigma: float = 0.05  # of TDT, as is omega: see asrkit.losses.tdt_loss
    omega: float = 0.1
    ema: float = 0.998
    curriculum: tuple[float, float] = (
        2.5,
        0.2,
    )  # longest utterance at the start (s); share of the run until all are in
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    features: FeatureConfig = field(default_factory=FeatureConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    checkpoint_s: float = 30.0
    evaluate_s: float = 60.0
    threads: int = field(
        default_factory=lambda: max(1, usable_cores() // 2)
    )  # the other half prepares batches
    seed: int = 0

    def __post_init__(self) -> None:
        expect(
            self.steps > 0 and self.seconds > 0,
            "steps, seconds",
            "both > 0",
            (self.steps, self.seconds),
        )
        expect(self.seed >= 0, "seed", "at least 0", self.seed)

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then a half cosine to zero; `progress` in 0..1."""
        if progress < self.warmup:
            return self.peak_lr * (progress + 1e-3) / (self.warmup + 1e-3)
        return (
            self.peak_lr
            * 0.5
            * (1 + math.cos(math.pi * min(1.0, (progress - self.warmup) / (1 - self.warmup))))
        )

    def longest_s(self, progress: float) -> float:
        """Longest utterance (s) the length curriculum admits at `progress`."""
        start, until = self.curriculum
        return math.inf if progress >= until else start * (1 + 3 * progress / until)

    def dtype(self, device: torch.device) -> torch.dtype:
        """Autocast dtype of the model: bfloat16 where the hardware computes in it, else float32."""
        if self.precision != "auto":
            return getattr(torch, self.precision)
        fast = (
            torch.cuda.is_bf16_supported(including_emulation=False)
            if device.type == "cuda"
            else torch.cpu._is_avx512_bf16_supported()
        )
        return torch.bfloat16 if fast else torch.float32


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Where the model is, how the loss went, and the word error rate on the dev set (None if there
    was none).
    """

    path: Path
    history: list[dict[str, float]]
    dev: ErrorRate | None


class Prepared(NamedTuple):
    """A batch as the model takes it: features (B, T, F) with lengths (B,), targets (B, U) with
    lengths (B,), speech in s.
    """

    features: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor
    speech_s: float


def prepare(batch: Batch, config: TrainConfig, step: int) -> Prepared:
    """Augmented log-mel features of a batch, a function of (batch, seed, step) alone."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    waveforms, samples = augment(
        batch.waveforms, batch.sample_lengths, generator, config=config.augment
    )
    features, lengths = log_mel(waveforms, samples, config=config.features)
    features = spec_augment(features, lengths, generator, config=config.augment)
    speech_s = float(samples.sum()) / config.features.rate_hz
    return Prepared(features, lengths, batch.targets, batch.target_lengths, speech_s)


def ahead(
    batches: Iterator[Batch], config: TrainConfig, first: int, *, depth: int = 2
) -> Iterator[Prepared]:
    """`prepare` of each batch in order from step `first` on, `depth` batches ahead of their use, in
    a thread of its own.
    """
    with ThreadPoolExecutor(1) as pool:

        def submit(step: int) -> Future[Prepared]:
            return pool.submit(one, step)

        def one(step: int) -> Prepared:
            batch = next(batches, None)
            expect(
                batch is not None,
                "batches",
                "batches without end",
                f"none for step {step}",
                "Begin anew where they end.",
            )
            assert batch is not None
            return prepare(batch, config, step)

        pending = deque(submit(first + i) for i in range(depth))
        for step in count(first + depth):
            pending.append(submit(step))
            yield pending.popleft().result()


def training_loss(model: TransducerModel, batch: Prepared, config: TrainConfig) -> Tensor:
    """Nats per label, a scalar: RNN-T, or TDT if the model has durations, plus `ctc_weight` times
    CTC.
    """
    device = next(model.parameters()).device
    features, lengths, targets, target_lengths = (part.to(device) for part in batch[:4])
    dtype = config.dtype(device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        logits, lengths, ctc = model(features, lengths, targets)
    labels = target_lengths.sum().clamp(min=1)  # a batch of silence has none
    given = (logits.float(), targets.int(), lengths.int(), target_lengths.int())
    if model.durations:
        rules: dict[str, Any] = {
            "durations": model.durations,
            "sigma": config.sigma,
            "omega": config.omega,
        }
        loss = tdt_loss(*given, reduction="sum", **rules) / labels
    else:
        loss = rnnt_loss(*given, reduction="sum") / labels
    if config.ctc_weight:
        ctc = ctc.float().transpose(0, 1)  # (T, B, V), as torch wants it
        extra = F.ctc_loss(
            ctc, targets, lengths, target_lengths, model.blank, reduction="sum", zero_infinity=True
        )
        loss = loss + config.ctc_weight * extra / labels
    return loss


def update(
    model: TransducerModel, optimizer: torch.optim.Optimizer, loss: Tensor, config: TrainConfig
) -> Tensor:
    """Norm of the gradient of `loss`, a scalar, before it is clipped and one optimizer step made,
    unless it is not finite.
    """
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    if bool(norm.isfinite()):
        optimizer.step()
    optimizer.zero_grad(
        set_to_none=True
    )  # now: gradients would lie beside the activations of the next forward pass
    return norm


def training_step(
    model: TransducerModel, optimizer: torch.optim.Optimizer, config: TrainConfig | None = None
) -> Callable[[int, float, int], None]:
    """step(n, seconds, tokens) for asrkit.data.oom_search: one of training, on n random utterances
    of that length.

    Its batch is part of it. What prepares batches is not, for that happens beside training; nor are
    the EMA weights.
    """
    config = config or TrainConfig()
    device, bins, V = next(model.parameters()).device, config.features.bins, model.blank

    def step(n: int, seconds: float, tokens: int) -> None:
        T = max(1, round(seconds * config.features.rate_hz) // config.features.hop_samples)
        targets = torch.randint(V, (n, tokens), device=device)
        lengths = torch.full((n,), T, device=device), torch.full((n,), tokens, device=device)
        batch = Prepared(
            torch.randn(n, T, bins, device=device), lengths[0], targets, lengths[1], n * seconds
        )
        update(model, optimizer, training_loss(model, batch, config), config)

    return step


def evaluate(
    checkpoint: Checkpoint, utterances: Utterances, *, batch_seconds: float = 120.0
) -> tuple[ErrorRate, dict[str, str], float]:
    """Word error rate (case ignored), text by utterance id, and RTFx (seconds of speech per second
    of computing).
    """
    texts, references, busy = dict[str, str](), dict[str, str](), 0.0
    for batch in batches(
        utterances, checkpoint.tokenizer, batch_seconds=batch_seconds, order="sorted"
    ):
        start = time.perf_counter()
        tokens = recognize(checkpoint, batch.waveforms, batch.sample_lengths).tokens()
        busy += time.perf_counter() - start
        texts |= {
            id_: normalize_text(checkpoint.tokenizer.decode(row))
            for id_, row in zip(batch.ids, tokens, strict=True)
        }
        references |= {
            id_: normalize_text(text) for id_, text in zip(batch.ids, batch.texts, strict=True)
        }
    return (
        wer(list(references.values()), [texts[id_] for id_ in references]),
        texts,
        utterances.total_seconds / busy,
    )


class _Run:
    """The moving parts of one training run, and how they are saved and restored."""

    def __init__(
        self,
        model_config: TransducerConfig,
        config: TrainConfig,
        device: torch.device,
        data: dict[str, str],
    ) -> None:
        torch.manual_seed(config.seed)
        self.model = TransducerModel(model_config).to(device).train()
        self.ema = deepcopy(self.model).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.peak_lr,
            betas=(0.9, 0.98),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.settings = json.loads(
            json.dumps(
                asdict(config) | data | {"model": config_to_dict(model_config), "threads": None}
            )
        )
        self.config, self.step, self.seconds, self.history = config, 0, 0.0, []  # type: ignore[var-annotated]

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0..1."""
        return min(1.0, max(self.step / self.config.steps, self.seconds / self.config.seconds))

    def advance(self, stream: Iterator[Prepared]) -> dict[str, float]:
        """One optimizer step, the wait for its batch included; its log line."""
        start, config, rate = (
            time.perf_counter(),
            self.config,
            self.config.learning_rate(self.progress),
        )
        torch.manual_seed(
            config.seed * 1_000_003 + self.step
        )  # dropout: a function of (seed, step), as batches are
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = training_loss(self.model, batch := next(stream), config)
        norm = update(
            self.model, self.optimizer, loss, config
        )  # an overflowing batch is skipped, and its loss stays in the log
        self.step += 1
        decay = min(config.ema, self.step / (9 + self.step))
        for mean, value in zip(
            self.ema.state_dict().values(), self.model.state_dict().values(), strict=True
        ):
            mean.lerp_(value, 1 - decay) if mean.is_floating_point() else mean.copy_(value)
        taken = time.perf_counter() - start
        self.seconds += taken
        told = {
            "step": self.step,
            "seconds": self.seconds,
            "loss": loss.item(),
            "lr": rate,
            "gradient_norm": norm.item(),
        }
        return told | {"rtfx": batch.speech_s / taken}

    def save(self, path: Path) -> None:
        """Write all of it, atomically."""
        state = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "config": json.dumps(self.settings),
        }
        with atomic(path) as temporary:
            torch.save(state, temporary)

    def restore(self, path: Path, log: Path) -> None:
        """Go back to where `path` was saved; log lines written after it are dropped."""
        anew = "Pass resume=False to start anew (asrkit train --fresh)."
        try:
            state = torch.load(path, "cpu", weights_only=True)
            old = json.loads(state["config"])
        except Exception as error:  # half a pickle raises anything
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"state: {path} is damaged ({why:.80}). {anew}") from None
        other = [
            f"{name} {old.get(name)} -> {value}"
            for name, value in self.settings.items()
            if old.get(name) != value
        ]
        expect(
            not other,
            "config",
            f"the settings {path.parent} was started with",
            f"other {'; '.join(other)}",
            anew,
        )
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        self.history = [line for line in lines if line["step"] <= self.step]
        with atomic(log) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in self.history))


def _warm_up(device: str, durations: Sequence[int]) -> None:
    """Compile the losses before the clock starts: the first training on a machine waits some ten
    seconds for each.
    """
    logits, lengths = (
        torch.zeros(1, 1, 1, 3, device=device, requires_grad=True),
        torch.ones(1, dtype=torch.int, device=device),
    )
    rest = lengths[:, None][:, :0], lengths, lengths - 1
    rnnt_loss(logits, *rest).backward()  # TDT takes it too, at the share omega of its steps
    if durations:
        tdt_loss(logits, *rest, durations=(1,)).backward()


def train(
    model_config: TransducerConfig,
    tokenizer: Tokenizer,
    train_set: Utterances,
    dev_set: Utterances | None = None,
    *,
    out: Path,
    config: TrainConfig | None = None,
    device: str = "cpu",
    resume: bool = True,
    progress: bool = True,
    on_step: Callable[[list[dict[str, float]]], None] | None = None,
    batches: Callable[[int], Iterator[Batch]] | None = None,
) -> TrainResult:
    """Train into the folder `out` (resuming what lies there), and return the exported EMA model's
    path.

    on_step: called after every step with the log so far, e.g. to draw a live curve. batches(k):
    those of step k and after, without end, in place of `training_stream` and its curriculum;
    resumed, a run goes on with what it returns then.
    """
    config, out, dev_set = config or TrainConfig(), Path(out), dev_set or None
    expect(
        tokenizer.vocab_size == model_config.vocab_size,
        "vocab_size",
        str(tokenizer.vocab_size),
        model_config.vocab_size,
    )
    for text in [*train_set.texts, *(dev_set.texts if dev_set else [])]:
        tokenizer.encode(text)  # what has no tokens is refused now, not when its turn comes
    speech = content_hash(
        [[*train_set.ids], [*train_set.texts], [len(waveform) for waveform in train_set.waveforms]]
    )
    data = {"tokenizer": content_hash(dump_tokenizer(tokenizer)), "train_set": speech}
    out.mkdir(parents=True, exist_ok=True)
    log, saved, exported = out / "log.jsonl", out / "state.pt", out / "model.safetensors"
    for part in [
        part for path in (log, saved, exported) for part in out.glob(f".{path.stem}-*{path.suffix}")
    ]:
        part.unlink()  # a kill in mid-write left it
    with (
        torch.enable_grad(),
        torch.random.fork_rng([device] if device != "cpu" else []),
        ExitStack() as after,
    ):
        after.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.threads)
        run = _Run(model_config, config, torch.device(device), data)
        if resume and saved.exists():
            run.restore(saved, log)
            tqdm.write(f"resuming {out} at step {run.step}")
        for old in (
            () if run.step else (saved, log)
        ):  # the state too: else a kill before the next would resume the run before
            old.unlink(missing_ok=True)
        stream = (
            batches(run.step)
            if batches
            else training_stream(
                train_set,
                tokenizer,
                batch_seconds=config.batch_seconds,
                seed=config.seed,
                start_step=run.step,
                max_seconds=lambda step: config.longest_s(
                    max(step / config.steps, run.seconds / config.seconds)
                ),
            )
        )
        _warm_up(device, model_config.durations)
        after.push(
            lambda kind, *_: run.save(saved) if kind is KeyboardInterrupt else None
        )  # Ctrl-C loses no more than a step
        dev = _loop(
            run,
            ahead(stream, config, run.step),
            dev_set,
            tokenizer,
            (log, saved, exported),
            progress,
            on_step,
        )
    return TrainResult(path=exported, history=run.history, dev=dev)


def _loop(
    run: _Run,
    stream: Iterator[Prepared],
    dev_set: Utterances | None,
    tokenizer: Tokenizer,
    paths: tuple[Path, Path, Path],
    progress: bool,
    on_step: Any,
) -> ErrorRate | None:
    config, (log, saved, exported) = run.config, paths
    dev, saved_at, evaluated_at = None, run.seconds, run.seconds

    def checkpoint() -> Checkpoint:
        notes = {"step": run.step, "seconds": round(run.seconds, 1), "seed": config.seed}
        return Checkpoint(run.ema, tokenizer, asdict(config.features), notes)

    bar = tqdm(
        total=100,
        disable=not progress,
        unit="%",
        bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
    )
    bar.mininterval = 0.1 if sys.stderr.isatty() else 10.0  # a log needs no line a step
    with log.open("a") as lines, bar:
        while run.progress < 1:
            line = run.advance(stream)
            run.history.append(line)
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            shown = "-" if dev is None else f"{dev.rate:.1%}"
            bar.set_postfix(
                loss=f"{line['loss']:.2f}", rtfx=f"{line['rtfx']:.0f}", wer=shown, refresh=False
            )
            bar.update(100 * run.progress - bar.n)
            if on_step is not None:
                on_step(run.history)
            if run.progress >= 1 or run.seconds - saved_at >= config.checkpoint_s:
                save_checkpoint(
                    exported, checkpoint()
                )  # first: a run that says it is finished has its model
                run.save(saved)
                saved_at = run.seconds
            if dev_set is not None and (
                run.progress >= 1 or run.seconds - evaluated_at >= config.evaluate_s
            ):
                dev = evaluate(checkpoint(), dev_set)[0]
                evaluated_at = run.seconds
    if (
        dev is None and dev_set is not None
    ):  # a finished run, resumed: nothing left to do but to score it
        dev = evaluate(checkpoint(), dev_set)[0]
    return dev
