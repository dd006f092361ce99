"""A block pool as a browser draws it: states, cells, frames, and the files that draw them."""
