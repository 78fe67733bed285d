"""Code that several lessons share: planted models, a recogniser of files, variants of a model.

Benchmarks use it too, so it imports on a bare GPU machine, with torch, NumPy and Numba only.
"""
