"""Slots below the pool, in host memory and on disk: which prefix and which parked sequence lies where."""
