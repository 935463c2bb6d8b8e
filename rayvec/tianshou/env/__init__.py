"""Tianshou's vector environment, stepped by rayvec."""
