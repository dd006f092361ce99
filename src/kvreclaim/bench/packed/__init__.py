"""`kvreclaim bench packed`: weights of 4, 6 and 8 bits beside bf16."""
