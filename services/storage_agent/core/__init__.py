"""What the storage agent decides: pure, synchronous, driven by its shell."""
