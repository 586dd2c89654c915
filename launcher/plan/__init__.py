"""Which layout of a run is fastest where: enumerated, checked for memory, timed on paper, explained and written."""
