"""Experimental: which layout of a run is fastest where, as a prediction on paper that no run here has confirmed."""
