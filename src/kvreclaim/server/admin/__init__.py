"""Endpoints and logs of the operator."""
