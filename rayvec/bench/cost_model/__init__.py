"""A model of what a step costs, its fit, its check, and what it recommends."""
