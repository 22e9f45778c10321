"""Helpers that rooms share. Nothing here is public; names and places may change at any time."""
