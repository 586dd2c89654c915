"""A cluster on this machine: `hosts.py` makes machines of network and process namespaces, and breaks them."""
