"""A stand-in of llama-cpp-python for the benchmark's worker."""
