"""Benchmarks: how steps/s scale over nodes, and a cost model that predicts more nodes."""
