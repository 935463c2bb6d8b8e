"""How environments are made on the processes that step them."""
