"""Tianshou's algorithms on several ranks, and IMPALA."""
