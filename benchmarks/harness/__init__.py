"""What runs a suite: cases, the runner, tables of its records, and the run of all suites."""
