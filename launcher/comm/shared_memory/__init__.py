"""CPU ranks of one machine read what they need out of each other's memory."""
