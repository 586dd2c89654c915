"""The documentation: what is made from the code is up to date, links lead somewhere, examples run."""
