"""The process that transcribes shards: `python -m asrkit.transcribe.bulk.worker FOLDER MACHINE`.

`workers.py` starts it and sends names of shards, one a line; it answers with JSON, one event a
line. It ends when nobody is there any more to send names.
"""

import json
import os
import sys
import threading
from queue import SimpleQueue
from typing import Any, TextIO

import torch

from asrkit.shapes import message
from asrkit.transcribe.bulk.planning import load_plan
from asrkit.transcribe.bulk.shards import ShardTranscriber
from asrkit.transcribe.bulk.tasks import Machine, as_json, from_json


def main() -> None:
    """Transcribe the shards whose names come on stdin."""
    names: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(names,), daemon=True).start()
    # What libraries print must not come between the events.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        _transcribe(names, events)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        _send(events, stop=message(error))


def _listen(names: "SimpleQueue[str]") -> None:
    """Pass on the names; end this process with the one that sends them, however that ended."""
    for line in sys.stdin:
        names.put(line.strip())
    os._exit(0)


def _send(events: TextIO, **event: Any) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


def _transcribe(names: "SimpleQueue[str]", events: TextIO) -> None:
    machine = from_json(Machine, json.loads(sys.argv[2]))
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    plan = load_plan(sys.argv[1])
    shards = {shard.name: shard for shard in plan.shards}

    def progress(audio_s: float) -> None:
        _send(events, transcribed_s=audio_s)

    transcriber = ShardTranscriber(plan, machine, progress=progress)
    _send(events, ready=True)
    while True:
        name = names.get()
        counts = transcriber.transcribe(shards[name])
        _send(events, shard=name, counts=None if counts is None else as_json(counts))


if __name__ == "__main__":
    main()
