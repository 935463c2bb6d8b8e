"""Tianshou's Collector and buffers, fed by chunks."""
