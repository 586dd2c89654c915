"""Tests of the documentation: generated pages are up to date, links resolve, examples run."""
