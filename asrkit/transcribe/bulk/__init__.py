"""Bulk transcription: several workers that share one model, and corpora in shards.

layout.py      how many workers there are, and their cores and threads
workers.py     the only supervisor of worker processes, with its retries
in_workers.py  files transcribed by forked workers: `transcribe_in_workers`
manifests.py   recordings of folders, manifests, lhotse cuts and tars
shards.py      a corpus planned in shards, transcribed and read again
ray.py         shards transcribed by a Ray cluster
"""
