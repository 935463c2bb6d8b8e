"""A soak test: random faults of all kinds, and not one transition may be wrong, doubled or joined.

    PYTHONPATH=tests python -m soak --minutes 10 --fault-every 5

Environments count their own steps and say in every observation who they are: index, instance, episode and step. The
driver steps them one by one and in chunks while environments, workers, actors, fork servers and nodes fail. An auditor
compares every answer with the one before it. Not part of the suite; ``make soak`` runs it.
"""
