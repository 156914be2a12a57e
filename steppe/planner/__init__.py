"""What the peaks will be, which schedule to switch on, and why; free of torch."""
