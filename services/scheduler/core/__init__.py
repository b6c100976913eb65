"""The scheduler's decisions: pure, synchronous, time is a parameter."""
