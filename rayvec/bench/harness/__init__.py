"""What runs in a process of its own, under whatever interpreter a peer needs: imports Gymnasium and NumPy alone."""
