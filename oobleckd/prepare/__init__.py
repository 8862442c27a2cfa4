"""Text made into the tokens that a job trains on: sources, tokenizer, pieces, and the folder they become."""
