"""Imported last by the process that ranks are forked from: excludes its imports from the garbage collection of ranks.

Collecting all objects of torch and transformers takes a third of a second, in every rank.
"""

import gc

gc.collect()
gc.freeze()
