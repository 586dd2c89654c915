"""Experimental: predicts the fastest layouts of a run; not yet confirmed by runs of this launcher on GPUs."""
