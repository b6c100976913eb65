"""What several test suites share: checkpoints made on the spot, and a whole cluster."""
