"""The block pool counted in runs of blocks that were computed together: same answers, no loop over blocks."""
