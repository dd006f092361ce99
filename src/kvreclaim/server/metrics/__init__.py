"""Prometheus metrics: definitions (catalogue), counting (observer), export (collector)."""
