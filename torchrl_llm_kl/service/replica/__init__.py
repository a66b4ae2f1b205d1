"""The actor that answers requests: queue, batches, engine, watchdog."""
