"""Faults that the tests have to find: `make mutants`."""
