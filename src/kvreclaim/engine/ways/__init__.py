"""One file for each way of compressing."""
