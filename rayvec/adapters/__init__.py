"""Adapters for scripts that expect the vector environments of other libraries or versions."""
