"""A process of the suite `jasper-training`, which torchrun starts: it times training steps.

Its argument is the params of the records as JSON. The first process prints the times by precision.
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed

from asrkit.models import presets
from asrkit.workbench.lessons.shared.jasper import random_jasper
from benchmarks.suites.jasper import step_times


def main() -> None:
    """Time the steps of this process, whose gradients are averaged over all processes."""
    params = json.loads(sys.argv[1])
    device = params["device"]
    torch.set_num_threads(params["threads"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ["WORLD_SIZE"] != "1":
        distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    config: Any = presets.PRESETS[params["preset"]]()
    times = step_times(random_jasper(config, device), params)
    if os.environ["RANK"] == "0":
        print(json.dumps({name: asdict(timing) for name, timing in times.items()}))
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
