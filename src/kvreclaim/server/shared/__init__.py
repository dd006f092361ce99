"""From a request body to the engine: sampling, compression, tools, access."""
