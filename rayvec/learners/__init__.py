"""Learners turn batches of experience into new weights. None of them imports Ray."""
