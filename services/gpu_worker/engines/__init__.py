"""What runs a model: a real engine, and a deterministic one for tests."""
