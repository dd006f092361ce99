"""RULER (arXiv 2404.06654): its 13 tasks at any length, with NVIDIA's generators and scoring rules."""
