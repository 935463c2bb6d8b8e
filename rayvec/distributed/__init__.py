"""Learners on several ranks: how they sum, and how they are started, fed and restarted."""
