"""What the router decides: pure, synchronous, given the time."""
