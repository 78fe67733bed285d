"""Batches: lengths, padding, buckets, strategies, a sampler, and a search for the largest ones."""
