"""Target models: one config-driven decoder and the checkpoints it loads."""
