"""Benchmarks: how steps/s scale over nodes, beside peers; a cost model; prices; learners.

Nothing is imported here, so that a peer's own interpreter can import :mod:`rayvec.bench.harness`, which needs no
more than Gymnasium and NumPy.
"""
