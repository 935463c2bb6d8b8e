"""Many machines: Ray sessions, placement, node actors, streams between driver and nodes."""
