"""Content of the host's and the disk's slots: prefixes, parked sequences, recurrent states. No tensors."""
