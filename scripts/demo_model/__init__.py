"""Parts of the trainer of the demo model: batches, tokenizer, network and optimisers, check."""
