"""The state of one training run, a step of it, and how it is saved and restored."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.models import make_model
from asrkit.models.assembly import Model, ModelConfig
from asrkit.models.checkpoints import config_from_dict, config_to_dict
from asrkit.optim import Average, Lamb, NovoGrad
from asrkit.shapes import expect
from asrkit.training.batches import LaneBatches, Prepared, step_seed
from asrkit.training.config import TrainConfig
from asrkit.training.folder import FRESH, RunFolder, read_state
from asrkit.training.lanes import LaneStatistics, lane_number, weigh
from asrkit.training.processes import Processes
from asrkit.training.reading import Reading
from asrkit.training.steps import update
from asrkit.training.wrapping import (
    BatchLoss,
    accumulating,
    laid_out_like,
    load_model_state,
    load_optimizer_state,
    optimizer_state,
    whole_by_name,
    wrap,
)

# What a setting was in runs that were saved without it; None: what is asked for now.
ADDED_LATER: dict[str, Any] = {
    "joint": None,
    "lanes": 1,
    "optimizer": "adamw",
    "smoothing": 0.0,
}
# The same for what the settings hold.
ADDED_WITHIN: dict[str, dict[str, Any]] = {
    "features": {"range_db": None, "edges": "zeros", "fill_s": None},
    "augment": {"trim": 0.0, "trim_db": [10.0, 40.0]},
}
# Settings that a resumed run may change.
FREE = {"threads": None, "shard": None, "evaluate": None}


class Agreement(NamedTuple):
    """What the processes of a run agree on before a step.

    `labels` and `speech_s`, labels and seconds of speech of all lanes; `stop`, whether a process
    wishes to stop; `failed`, whether one could not make its batches.
    """

    labels: float
    speech_s: float
    stop: bool
    failed: bool


class Exchanged(NamedTuple):
    """The numbers that processes sum up to agree on a step; `plan` is a hash of the batches."""

    labels: float
    speech_s: float
    clock: float  # of rank 0; 0 on the others
    stop: float
    failed: float
    plan: float
    plan_squared: float


class Step(NamedTuple):
    """A step that has been queued: its line of the log, and the numbers that the device has yet.

    `line` lacks `loss` and `gradient_norm`, which `reading` holds; `speech_s` is that of all lanes.
    """

    line: dict[str, float]
    reading: Reading
    speech_s: float


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
        model_config: ModelConfig,
        config: TrainConfig,
        device: torch.device,
        data: dict[str, str],
    ) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.device = device
        self.model = make_model(model_config).to(device).train()
        self.settings = run_settings(model_config, config) | data
        self.step = 0
        self.seconds = 0.0  # training time, by the clock of rank 0
        self.own_seconds = 0.0  # by that of this process
        self.logged_seconds = 0.0  # at the last line of the log
        self.between_steps = True
        self.history: list[dict[str, float]] = []
        if config.shard:
            self.processes = Processes()  # `distribute` has to follow
        else:
            self.distribute(Processes())

    def distribute(self, processes: Processes) -> None:
        """Share the run out to processes, before its first step or `restore`.

        Args:
            processes: Of this run.
        """
        self.processes = processes
        self.lanes = processes.lanes(self.config.lanes)
        self.statistics = LaneStatistics(self.model, self.config.lanes)
        self.batch_loss = wrap(BatchLoss(self.model, self.config), processes)
        self.optimizer = make_optimizer(self.model, self.config)
        self.average = Average(self.model, self.config.ema)

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0..1."""
        return min(1.0, max(self.step / self.config.steps, self.seconds / self.config.seconds))

    def longest_s(self, step: int) -> float:
        """Longest utterance, in seconds, that the length curriculum admits at this step."""
        by_steps = step / self.config.steps
        by_time = self.seconds / self.config.seconds
        return self.config.longest_s(max(by_steps, by_time))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A block that counts as training time: the wait for batches, and steps."""
        start = time.perf_counter()
        yield
        self.own_seconds += time.perf_counter() - start

    def agree(self, batches: LaneBatches | None, *, stop: bool = False) -> Agreement:
        """Agree with the other processes on the next step, by one sum of a few numbers.

        Args:
            batches: Of this process; None if it could not make them.
            stop: Whether this process wishes to stop.

        Returns:
            The same on all processes, which then have rank 0's clock too.

        Raises:
            ValueError: The processes planned different batches.
        """
        labels = 0.0
        speech_s = 0.0
        plan = 0.0
        if batches is not None:
            labels = float(sum(int(batch.target_lengths.sum()) for batch in batches.own))
            speech_s = sum(batch.speech_s for batch in batches.own)
            plan = float(batches.plan)
        clock = 0.0
        if self.processes.first:  # without the wait for this batch, which no run repeats
            clock = self.logged_seconds
        failed = batches is None
        own = Exchanged(labels, speech_s, clock, stop, failed, plan, plan * plan)
        total = Exchanged(*self.processes.total([*own]))
        self.seconds = total.clock
        # the variance of equal numbers is zero; 12 bits are exact for up to 2**14 processes
        equal = self.processes.count * total.plan_squared == total.plan * total.plan
        remedy = "Start all of them on the same data."
        wanted = f"the same plan of step {self.step} on all processes"
        expect(total.failed > 0 or equal, "train_set", wanted, "different ones", remedy)
        return Agreement(total.labels, total.speech_s, stop=total.stop > 0, failed=total.failed > 0)

    def advance(self, batches: Sequence[Prepared], agreed: Agreement) -> Step:
        """Queue one optimizer step, for `read` to make its log line; a CPU has then done it.

        A step whose gradient is not finite is skipped; its loss stays in the log.

        Args:
            batches: One for each lane of this process.
            agreed: What `agree` returned for them.
        """
        self.between_steps = False
        with self.timed():
            rate = self.config.learning_rate(self.progress)
            set_rate(self.optimizer, rate)
            self.statistics.begin_step()
            for lane, batch in zip(self.lanes[:-1], batches[:-1], strict=True):
                with accumulating(self.batch_loss):
                    loss, _ = self._lane_loss(lane, batch, agreed)
                    loss.backward()
            loss, lean = self._lane_loss(self.lanes[-1], batches[-1], agreed)
            norm = update(self.model, self.optimizer, loss, self.config)
            mean_loss = self.statistics.end_step(self.processes)
            self.step += 1
            self.average.update()
            reading = Reading(mean_loss, norm)
        self.between_steps = True
        line = {"step": self.step, "lr": rate, "lean": lean}
        return Step(line, reading, agreed.speech_s)

    def read(self, step: Step) -> dict[str, float]:
        """Log line of a step, once the device has made it; that wait is training time.

        Args:
            step: From `advance`, not read yet; those before it have been.
        """
        with self.timed():
            loss, norm = step.reading.values()
        taken_s = self.own_seconds - self.logged_seconds
        self.logged_seconds = self.own_seconds
        return {
            "step": step.line["step"],
            "seconds": self.own_seconds,
            "loss": loss,
            "lr": step.line["lr"],
            "gradient_norm": norm,
            "rtfx": step.speech_s / taken_s,
            "lean": step.line["lean"],
        }

    def _lane_loss(self, lane: int, batch: Prepared, agreed: Agreement) -> tuple[Tensor, bool]:
        """Weighed loss of a lane, a scalar with a graph, and whether the lean loss computed it."""
        number = lane_number(self.step, lane, self.config.lanes)
        torch.manual_seed(step_seed(self.config.seed, number))  # dropout
        self.statistics.begin_lane()
        per_label, lean = self.batch_loss(lambda: batch)
        labels = float(batch.target_lengths.sum())
        count = self.processes.count
        weighed = weigh(per_label, labels, agreed.labels, processes=count)
        self.statistics.end_lane(weighed / count)
        return weighed, lean

    def averaged_model(self) -> Model:
        """A model with averaged weights, whole. Where weights are sharded, all processes ask."""
        device = next(self.model.parameters()).device
        with torch.random.fork_rng(devices=[]):
            model = make_model(self.model.config).to(device).eval().requires_grad_(False)
        model.load_state_dict(whole_by_name(self.average.values))
        return model

    def save(self, folder: RunFolder) -> None:
        """Write what is needed to resume, whatever wraps the model; all processes have to call it.

        Args:
            folder: Of the run. The log is a file of its own.
        """
        state = {
            "model": whole_by_name(self.model.state_dict()),
            "ema": whole_by_name(self.average.values),
            "optimizer": optimizer_state(self.optimizer, self.model),
            "step": self.step,
            "seconds": self.own_seconds,
            "config": json.dumps(self.settings),
        }
        if self.processes.first:
            folder.save_state(state)

    def restore(self, path: Path, folder: RunFolder) -> None:
        """Go back to where `path` was saved; log lines written after it are dropped.

        Args:
            path: A whole state of the folder.
            folder: Of the run.

        Raises:
            ValueError: The file is of a run with other settings.
        """
        state = read_state(path)
        saved = json.loads(state["config"])
        if "model" in saved:  # with what has been added to its config since
            saved["model"] = json.loads(
                json.dumps(config_to_dict(config_from_dict(saved["model"])))
            )
        changed = []
        for name, value in self.settings.items():
            before = saved.get(name)
            if name in ADDED_LATER and name not in saved:
                before = value if ADDED_LATER[name] is None else ADDED_LATER[name]
            if name in ADDED_WITHIN and before is not None:
                before = ADDED_WITHIN[name] | before
            if before != value:
                changed.append(_difference(name, before, value))
        wanted = f"the settings {folder.path} was started with"
        expect(not changed, "config", wanted, f"other {'; '.join(changed)}", FRESH)
        load_model_state(self.model, state["model"])
        averages = laid_out_like(self.average.values, state["ema"])
        self.average.load_state_dict({"values": averages, "updates": state["step"]})
        load_optimizer_state(self.optimizer, self.model, state["optimizer"])
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.own_seconds = self.seconds
        self.logged_seconds = self.seconds
        self.history = folder.read_log(self.step)


def run_settings(model_config: ModelConfig, config: TrainConfig) -> dict[str, Any]:
    """What two runs have to share to be the same one, as JSON gives it back.

    Args:
        model_config: Of the model.
        config: How it is trained; what a resumed run may change is left out.
    """
    settings = asdict(config)
    settings["peak_lr"] = config.highest_rate
    settings |= {"model": config_to_dict(model_config)} | FREE
    return json.loads(json.dumps(settings))


def _difference(name: str, before: Any, after: Any) -> str:
    """How a setting has changed: of a dict, or a list as long as before, the parts alone."""
    old, new = before, after
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        old = dict(enumerate(before))
        new = dict(enumerate(after))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{name} {before!s:.80} -> {after!s:.80}"
    parts = []
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            parts.append(_difference(f"{name}.{key}", old.get(key), new.get(key)))
    text = "; ".join(parts[:3])
    if len(parts) > 3:
        text += f" and {len(parts) - 3} more"
    return text


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run.

    Args:
        model: Whose parameters it changes, sharded or not.
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


def compile_optimizer(config: TrainConfig, device: torch.device) -> None:
    """Make one step with a single weight, so that the optimizer's kernels are compiled.

    The first step of LAMB on a CPU would wait for Numba, after the clock has started.

    Args:
        config: Which optimizer.
        device: Of the model.
    """
    weight = nn.Parameter(torch.zeros(1, device=device))
    optimizer = make_optimizer(nn.ParameterList([weight]), config)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()


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
