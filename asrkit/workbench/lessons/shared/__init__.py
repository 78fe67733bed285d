"""Parts of several lessons: planted models, recognisers of files, variants of a computation.

Benchmarks use them too, so a bare GPU machine, with torch, NumPy and Numba alone, imports them.
"""
