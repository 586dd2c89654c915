"""The data pipeline: from text to tokens to the global batch of each step.

Importing this package does not import `datasets`, which takes a second or more: an engine needs only the
caches.
"""
