"""Examples -> token examples, by a tokenizer and its chat template."""
