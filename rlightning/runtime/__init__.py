"""Where members run, and the driver that runs the engine."""
