"""The machinery of suites: cases, the runner, tables of records, and a run of all suites."""
