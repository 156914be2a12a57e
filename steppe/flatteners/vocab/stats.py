"""What the ring did: products, bytes, steps and waits, counted where they happen."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class RingStats:
    """Counters of one or more calls; hand one in to count (`stats=`), `reset` to start anew."""

    calls: int = 0
    schedule: str = ""  # of the last call
    tile_tokens: int = 0
    tile_vocab: int = 0
    rows: int = 0  # tokens that counted on this rank
    ignored_rows: int = 0
    multiply_adds: int = 0
    pass_size: int = 0  # multiply-adds of one matrix pass, of all calls
    payload_bytes: int = 0  # sent: hidden states, weights, gradients
    side_bytes: int = 0  # sent: labels, statistics, slopes, biases
    wait_s: float = 0.0  # host time spent waiting for other ranks
    busy_s: float = 0.0  # host time of the calls in all

    @property
    def passes(self) -> float:
        """Matrix passes, counted: 3 for local and one_pass, 4 for weights and activations."""
        return self.multiply_adds / self.pass_size if self.pass_size else 0.0

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, field.default)
