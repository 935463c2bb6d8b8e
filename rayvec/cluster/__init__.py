"""Multi-node execution: Ray sessions, placement, node actors, and streams between the driver and nodes."""
