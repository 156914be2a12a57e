"""Bridges to libraries that people already run."""
