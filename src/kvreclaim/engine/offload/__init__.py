"""Transfers between device, host and disk: blocks, parked sequences, sessions, snapshots."""
