"""Integers and words that everything above shares; standard library only."""
