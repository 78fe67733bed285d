"""The suites of benchmarks, one file each."""
