"""Imported last by the process that ranks are forked from: what it has imported, ranks' collections pass over.

A collection of all that torch and transformers make takes a third of a second, and each rank would do one.
"""

import gc

gc.collect()
gc.freeze()
