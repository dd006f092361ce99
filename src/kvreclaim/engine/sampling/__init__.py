"""From logits to tokens and text: logprobs, drawing, beams, detokenising."""
