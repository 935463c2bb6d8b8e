"""One machine: worker processes over shared memory."""
