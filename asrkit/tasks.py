"""The tasks of an encoder-decoder model. Importing this file needs no torch."""

from typing import Literal, get_args

Task = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = get_args(Task)
