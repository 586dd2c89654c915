"""A simulated cluster on this machine: `hosts.py` creates machines from network and process namespaces, and breaks
them.
"""
