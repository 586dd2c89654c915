"""Transport between CPU ranks of one machine, which read directly from each other's memory."""
