"""Adaptation as a service: one backbone, an adapted state for every stream, and no way from one stream to another."""
