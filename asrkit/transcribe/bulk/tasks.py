"""What is done with every recording of a plan, and how a process does it."""

import dataclasses
import types
import typing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from asrkit.shapes import expect
from asrkit.transcribe.bulk.inputs import file_state
from asrkit.transcribe.options import PipelineConfig, WindowOptions

T = TypeVar("T")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and all settings that the results of a plan depend on.

    Args:
        model: As `asrkit.models.load_checkpoint` takes it.
        dtype: Of its weights, one of DTYPES.
        context: Frames of attention to the left and right, of a FastConformer; None: all.
        windows: How recordings are cut. `batch_s` and `readers` do not change results.
        config: How the recogniser computes.
    """

    model: Path
    dtype: str = "float32"
    context: tuple[int, int] | None = None
    windows: WindowOptions = field(default_factory=WindowOptions)
    config: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        expect(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", repr(self.dtype))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How one process of a run works. Nothing of it changes results, rounding aside.

    Args:
        device: Where to compute: cpu, cuda or cuda:N.
        threads: CPU threads; None: as many as torch takes.
        batch_s: Most audio in one batch, in seconds; None: as the task says.
        readers: Threads that read recordings; None: as the task says.
    """

    device: str = "cpu"
    threads: int | None = None
    batch_s: float | None = None
    readers: int | None = None


def windows_on(machine: Machine, windows: WindowOptions) -> WindowOptions:
    """The windows of a task with the batches and readers of a machine.

    Args:
        machine: Of the process.
        windows: Of the task.
    """
    changed: dict[str, Any] = {}
    if machine.batch_s is not None:
        changed["batch_s"] = machine.batch_s
    if machine.readers is not None:
        changed["readers"] = machine.readers
    return dataclasses.replace(windows, **changed)


def absolute(task: Task) -> Task:
    """The same task for processes in any folder.

    Args:
        task: Names files.
    """
    config = task.config
    search = config.search
    if search is not None and search.lm is not None:
        config = dataclasses.replace(
            config, search=dataclasses.replace(search, lm=search.lm.absolute())
        )
    return dataclasses.replace(task, model=Path(task.model).absolute(), config=config)


def as_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON takes them; `from_json` makes them a dataclass again."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(one) for name, one in part.items()}
        if isinstance(part, tuple):
            return list(part)
        return str(part) if isinstance(part, Path) else part

    return plain(asdict(value))


def from_json(kind: type[T], values: dict[str, Any]) -> T:
    """The dataclass that `as_json` made `values` of.

    Args:
        kind: The dataclass. Fields may be dataclasses, paths and tuples, or None in their place.
        values: Its fields.
    """
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value) for name, value in values.items()})


def _typed(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    kinds = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = list(typing.get_args(hint))
    for one in kinds:
        if dataclasses.is_dataclass(one) and isinstance(value, dict):
            return from_json(one, value)  # type: ignore[arg-type]
        if one is Path:
            return Path(value)
        if typing.get_origin(one) is tuple:
            return tuple(value)
    return value


def model_state(task: Task) -> list[Any]:
    """What changes when the files of a model do: names, sizes and times of change.

    Args:
        task: Names the model, and perhaps an n-gram model.
    """
    files = [task.model]
    if task.model.is_dir():
        files = sorted(path for path in task.model.iterdir() if path.is_file())
    search = task.config.search
    if search is not None and search.lm is not None:
        files.append(search.lm)
    return [[str(path.absolute()), *file_state(path)] for path in files]


def load(task: Task, machine: Machine) -> Any:
    """The checkpoint of a task on a machine's device.

    Args:
        task: Names the model.
        machine: Names the device.
    """
    import torch

    from asrkit.export import is_exported
    from asrkit.models import limit_context, load_checkpoint

    exported = is_exported(task.model)
    remedy = "Pass the model that was exported."
    wanted = "a checkpoint with --shards"
    expect(not exported, "model", wanted, "a folder of asrkit export", remedy)
    dtype = getattr(torch, task.dtype)
    checkpoint = load_checkpoint(task.model, device=machine.device, dtype=dtype)
    if task.context is not None:
        limit_context(checkpoint.model, task.context)
    return checkpoint


def key(task: Task, checkpoint: Any) -> str:
    """A hash of the model and all settings that its transcripts depend on.

    Args:
        task: With the settings.
        checkpoint: Of the task, as it was loaded, before its weights are prepared.
    """
    from asrkit.transcribe.folder import made_by, text_settings

    settings = text_settings(task.windows, task.config)
    return made_by(checkpoint, settings | {"context": task.context})
