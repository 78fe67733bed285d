"""Batches: lengths and what padding costs, buckets, strategies, samplers, and a search for what
memory holds.
"""
