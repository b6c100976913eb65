"""What every service stands on: lifecycle, bus, store, inbox, configuration, logging, telemetry, and test twins."""
