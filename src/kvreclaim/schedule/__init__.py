"""Who runs, which blocks, which passes: integers only, the clock passed in."""
