"""From chunks to batches and episodes."""
