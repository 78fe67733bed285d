"""The state of one training run, a step of it, and how it is saved and restored."""

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asrkit.files import atomic
from asrkit.models import TransducerConfig, TransducerModel
from asrkit.models.checkpoints import config_to_dict
from asrkit.shapes import expect
from asrkit.training.batches import Prepared, step_seed
from asrkit.training.config import TrainConfig
from asrkit.training.objective import training_loss
from asrkit.training.steps import update

FRESH = "Pass resume=False to start anew (asrkit train --fresh)."
# Settings that older runs were saved without; these are resumed with what is asked for now.
ADDED_LATER = ("joint",)


class TrainingRun:
    """Model, averaged weights, optimizer, position and log of one run.

    Args:
        model_config: The model to make, its weights drawn from `config.seed`.
        config: How it is trained.
        device: Where.
        data: What identifies the data, saved with the settings: a run resumes on the same only.
    """

    def __init__(
        self,
        model_config: TransducerConfig,
        config: TrainConfig,
        device: torch.device,
        data: dict[str, str],
    ) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.model = TransducerModel(model_config).to(device).train()
        self.ema = deepcopy(self.model).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.peak_lr,
            betas=(0.9, 0.98),
            weight_decay=config.weight_decay,
            fused=True,
        )
        settings = asdict(config) | data
        settings |= {"model": config_to_dict(model_config), "threads": None}
        self.settings = json.loads(json.dumps(settings))
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0..1."""
        return min(1.0, max(self.step / self.config.steps, self.seconds / self.config.seconds))

    def longest_s(self, step: int) -> float:
        """Longest utterance, in seconds, that the length curriculum admits at this step."""
        by_steps = step / self.config.steps
        by_time = self.seconds / self.config.seconds
        return self.config.longest_s(max(by_steps, by_time))

    def advance(self, stream: Iterator[Prepared]) -> dict[str, float]:
        """Make one optimizer step on the next batch of `stream`, and return its log line.

        A batch whose gradient is not finite is skipped; its loss stays in the log.
        """
        start = time.perf_counter()  # the wait for the batch counts
        rate = self.config.learning_rate(self.progress)
        torch.manual_seed(step_seed(self.config.seed, self.step))  # dropout
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = next(stream)
        loss, lean = training_loss(self.model, batch, self.config)
        norm = update(self.model, self.optimizer, loss, self.config)
        self.step += 1
        average(self.ema, self.model, min(self.config.ema, self.step / (9 + self.step)))
        taken_s = time.perf_counter() - start
        self.seconds += taken_s
        return {
            "step": self.step,
            "seconds": self.seconds,
            "loss": loss.item(),
            "lr": rate,
            "gradient_norm": norm.item(),
            "rtfx": batch.speech_s / taken_s,
            "lean": lean,
        }

    def save(self, path: Path) -> None:
        """Write what is needed to resume, atomically; the log is a file of its own."""
        state = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "config": json.dumps(self.settings),
        }
        with atomic(path) as temporary:
            try:
                torch.save(state, temporary)
            except RuntimeError as error:  # torch counts bytes in place of naming the reason
                raise OSError(f"{path} cannot be written. Is the disk full? ({error})") from None

    def restore(self, path: Path, log: Path) -> None:
        """Go back to where `path` was saved; log lines written after it are dropped.

        Raises:
            ValueError: The file is damaged, or is of a run with other settings.
        """
        state, saved = _read_state(path)
        for name in ADDED_LATER:
            saved.setdefault(name, self.settings[name])
        changed = []
        for name, value in self.settings.items():
            if saved.get(name) != value:
                changed.append(f"{name} {saved.get(name)} -> {value}")
        wanted = f"the settings {path.parent} was started with"
        expect(not changed, "config", wanted, f"other {'; '.join(changed)}", FRESH)
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.seconds = state["seconds"]
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        self.history = [line for line in lines if line["step"] <= self.step]
        with atomic(log) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in self.history))


def average(mean: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the state of `mean` towards that of `model`, keeping the share `decay`; integers are
    copied.

    Args:
        mean: The averaged model, changed in place.
        model: The model as it is now.
        decay: Share of the average that stays, 0..1.
    """
    pairs = zip(mean.state_dict().values(), model.state_dict().values(), strict=True)
    for averaged, value in pairs:
        if averaged.is_floating_point():
            averaged.lerp_(value, 1 - decay)
        else:
            averaged.copy_(value)


def _read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `TrainingRun.save` wrote, and the settings in it; ValueError where it is damaged."""
    try:
        state = torch.load(path, "cpu", weights_only=True)
        return state, json.loads(state["config"])
    except Exception as error:  # half a pickle raises anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"state: {path} is damaged ({why:.80}). {FRESH}") from None
