"""``rayvec doctor``: checks each node of a cluster as a run would use it, and says what to do."""
