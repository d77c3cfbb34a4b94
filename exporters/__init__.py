"""Reporters: the metric catalogue and its Prometheus endpoint. Import the module you need."""
