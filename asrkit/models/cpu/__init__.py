"""Inference on a CPU: weights prepacked for oneDNN, a fused FastConformer, and int8.

`asrkit.models.optimize` chooses among them.
"""
