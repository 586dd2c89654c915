"""Faults that the tests must detect: `make mutants`."""
