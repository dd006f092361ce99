"""RULER (arXiv 2404.06654): its 13 tasks at any length, by NVIDIA's own generators and scoring rules."""
