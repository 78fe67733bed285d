"""The state of one training run, a step of it, and how it is saved and restored."""

import copy
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from asrkit.models import make_model
from asrkit.models.assembly import Model, ModelConfig
from asrkit.models.checkpoints import config_to_dict
from asrkit.optim import Lamb, NovoGrad
from asrkit.shapes import expect
from asrkit.training.batches import Prepared, step_seed
from asrkit.training.config import TrainConfig
from asrkit.training.distributed import BatchLoss, Processes, accumulating, replicated
from asrkit.training.folder import FRESH, RunFolder
from asrkit.training.steps import update

Tensors = tuple[Tensor, ...] | list[Tensor]
FREE = ("threads", "evaluate")  # settings that a resumed run may change


class TrainingRun:
    """Model, averaged weights, optimizer, position and log of one run.

    Args:
        model_config: The model to make, its weights drawn from `config.seed`.
        config: How it is trained.
        device: Where.
        data: What identifies the data, saved with the settings: a run resumes on the same only.
        processes: That train together; None: this one alone.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: TrainConfig,
        device: torch.device,
        data: dict[str, str],
        processes: Processes | None = None,
    ) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.device = device
        self.processes = processes or Processes()
        self.batches = config.accumulate * self.processes.count  # of a step
        self.model = make_model(model_config).to(device).train()
        self.settings = run_settings(model_config, config, self.batches) | data
        self.loss = replicated(BatchLoss(self.model, config), self.processes)
        self.optimizer = make_optimizer(self.model, config)
        self.average = AveragedModel(self.model, multi_avg_fn=self._blend, use_buffers=True)
        self.average.n_averaged.fill_(1)  # the weights as they are drawn count too
        self.step = 0
        self.seconds = 0.0  # training time, by the clock of the first process
        self.history: list[dict[str, float]] = []

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0..1; the same on all processes."""
        return min(1.0, max(self.step / self.config.steps, self.seconds / self.config.seconds))

    def longest_s(self, step: int) -> float:
        """Longest utterance, in seconds, that the length curriculum admits at this step."""
        by_steps = step / self.config.steps
        by_time = self.seconds / self.config.seconds
        return self.config.longest_s(max(by_steps, by_time))

    def advance(self, steps: Iterator[Sequence[Prepared]]) -> dict[str, float]:
        """Make one optimizer step; its line of the log.

        The loss is the mean over the labels of all batches of the step: each batch is weighed by
        its labels, since the mean of the batches' means would weigh a label among few more than
        others. A step whose gradient is not finite is skipped; its loss stays in the log.

        Args:
            steps: Yields the batches of this process for each step.
        """
        start = time.perf_counter()
        batches = next(steps)
        labels = sum(float(batch.target_lengths.sum()) for batch in batches)
        own_speech_s = sum(batch.speech_s for batch in batches)
        all_labels, speech_s = self.processes.sum(labels, own_speech_s)
        rate = self.config.learning_rate(self.progress)
        set_rate(self.optimizer, rate)
        places = self.processes.share(self.batches)
        *others, last = zip(places, batches, strict=True)
        parts = []
        for place, batch in others:
            with accumulating(self.loss):
                loss, _ = self._weighed_loss(place, batch, all_labels)
                parts.append(loss.detach().double())
                (loss * self.processes.count).backward()  # DDP divides by it
        loss, lean = self._weighed_loss(*last, all_labels)
        parts.append(loss.detach().double())
        norm = update(self.model, self.optimizer, loss * self.processes.count, self.config)
        self.average.update_parameters(self.model)
        own_loss = float(sum(parts))  # waits for the device
        own_s = time.perf_counter() - start
        mean_loss, taken_s = self.processes.sum(own_loss, own_s if self.processes.first else 0.0)
        self.step += 1
        self.seconds += taken_s
        line = {
            "step": self.step,
            "seconds": self.seconds,
            "loss": mean_loss,
            "lr": rate,
            "gradient_norm": norm.item(),
            "rtfx": speech_s / taken_s,
            "lean": lean,
        }
        self.history.append(line)
        return line

    def _weighed_loss(self, place: int, batch: Prepared, all_labels: float) -> tuple[Tensor, bool]:
        """A batch's part of the mean loss over all labels of the step, a scalar with a graph, and
        whether the lean loss computed it.
        """
        number = self.step * self.batches + place
        torch.manual_seed(step_seed(self.config.seed, number))  # dropout
        per_label, lean = self.loss(batch)
        labels = float(batch.target_lengths.sum())
        return per_label * (max(labels, 1.0) / max(all_labels, 1.0)), lean

    def averaged_model(self) -> Model:
        """A model with averaged weights."""
        model: Any = copy.deepcopy(self.average.module)
        return model.eval().requires_grad_(False)

    def _blend(self, averages: Tensors, values: Tensors, _: object) -> None:
        """Move averages of weights, all of one dtype, towards their values; a count is copied."""
        if not averages[0].is_floating_point():
            torch._foreach_copy_(averages, values)
            return
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))  # forgets the first soon
        torch._foreach_lerp_(averages, values, 1 - decay)

    def save(self, folder: RunFolder) -> None:
        """Write what is needed to resume.

        Args:
            folder: Of the run. The log is a file of its own.
        """
        folder.save_state(
            {
                "model": self.model.state_dict(),
                "ema": self.average.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "seconds": self.seconds,
                "config": json.dumps(self.settings),
            }
        )

    def restore(self, state: dict[str, Any], folder: RunFolder) -> None:
        """Go back to where a state was saved; log lines written after it are dropped.

        Args:
            state: What `folder` had.
            folder: Of the run.

        Raises:
            ValueError: The state is of a run with other settings, or of no run.
        """
        known = "config" in state
        expect(known, "state", "that of a training", f"{folder.state} without settings", FRESH)
        saved = json.loads(state["config"])
        changed = []
        for name, value in self.settings.items():
            if saved.get(name) != value:
                changed.append(_difference(name, saved.get(name), value))
        wanted = f"the settings {folder.path} was started with"
        expect(not changed, "config", wanted, f"other {'; '.join(changed)}", FRESH)
        self.model.load_state_dict(state["model"])
        self.average.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.history = folder.read_log(self.step)


def run_settings(model_config: ModelConfig, config: TrainConfig, batches: int) -> dict[str, Any]:
    """What two runs have to share to be the same one, as JSON gives it back.

    Args:
        model_config: Of the model.
        config: How it is trained; what a resumed run may change is left out.
        batches: Of a step, on all processes together.
    """
    settings = asdict(config) | {"peak_lr": config.highest_rate, "accumulate": batches}
    for name in FREE:
        del settings[name]
    settings["model"] = config_to_dict(model_config)
    return json.loads(json.dumps(settings))


def _difference(name: str, before: Any, after: Any) -> str:
    """How a setting has changed: of a dict the parts alone."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return f"{name} {before!s:.80} -> {after!s:.80}"
    parts = []
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            parts.append(_difference(f"{name}.{key}", before.get(key), after.get(key)))
    return "; ".join(parts)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run.

    Args:
        model: Whose parameters it changes.
        config: Which, its learning rate and weight decay. LAMB clips gradients too; NovoGrad
            divides them by their norms, so `clip` does not concern it.
    """
    if config.optimizer == "novograd":
        return NovoGrad(
            model.parameters(), lr=config.highest_rate, weight_decay=config.weight_decay
        )
    if config.optimizer == "lamb":
        return Lamb(
            model.parameters(),
            lr=config.highest_rate,
            betas=(0.9, 0.98),
            weight_decay=config.weight_decay,
            clip=config.clip,
        )
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.highest_rate,
        betas=(0.9, 0.98),
        weight_decay=config.weight_decay,
        fused=True,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameter groups a learning rate; where it is a tensor, in place.

    Args:
        optimizer: Of any kind.
        rate: The learning rate of the next step.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
