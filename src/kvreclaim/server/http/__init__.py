"""Connections, the gate in front of every request, and event streams."""
