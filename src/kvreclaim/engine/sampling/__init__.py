"""Turn logits into tokens and text: logprobs, sampling, beams, detokenization."""
