"""What the worker decides, without doing anything."""
