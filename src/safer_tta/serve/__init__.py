"""Adaptation as a service: one model in memory, and a separate adapted state for every stream."""
