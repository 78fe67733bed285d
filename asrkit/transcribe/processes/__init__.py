"""Several processes that transcribe on one machine, each on cores of its own, with one model.

`choose_layout` says how many processes there are and where they run, `transcribe_in_processes` uses
them as `transcribe` uses one. They are forked from a process that has loaded and prepared the
model: so its weights are in memory once, packed for oneDNN or not.
"""

from asrkit.transcribe.processes.cores import Layout, choose_layout
from asrkit.transcribe.processes.pool import Channel, Done, Ended, Message, Pool
from asrkit.transcribe.processes.recordings import transcribe_in_processes

__all__ = [
    "Channel",
    "Done",
    "Ended",
    "Layout",
    "Message",
    "Pool",
    "choose_layout",
    "transcribe_in_processes",
]
