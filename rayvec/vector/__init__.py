"""The Gymnasium adapter."""
