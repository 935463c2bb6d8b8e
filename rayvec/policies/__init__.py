"""What acts: noise, distributions, NumPy actors, and torch networks."""
