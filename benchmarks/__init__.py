"""Benchmarks: suites that time asrkit's implementations against references and other packages.

Run one from a checkout: `python -m benchmarks SUITE`, or `make bench`.
"""
