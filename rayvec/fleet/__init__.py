"""Commands for environments, and fleets of what executes them: workers of a machine, nodes of a cluster."""
