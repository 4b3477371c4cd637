"""A run's page in the explorer, in parts."""
