"""Speech recognition made fast, and measured: models, losses, decoders, batching, profiling, and
the notebooks' tools.

Importing asrkit decides nothing: no device is probed, no dtype set, nothing downloaded. The doors
are one level down: asrkit.features, .losses, .decoders, .models, .data, .training, .transcribe,
.profiling, .bench, .ledger, .report.
"""
