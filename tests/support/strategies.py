"""Hypothesis strategies that more than one folder of tests draws from."""

from __future__ import annotations

from hypothesis import strategies as st

SHARD_COUNTS = st.integers(min_value=1, max_value=8)
LENGTHS = st.integers(min_value=0, max_value=4096)
