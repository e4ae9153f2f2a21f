"""A decoder whose attention is compressed and convolutional (CCGQA), as a model of transformers; docs/ccgqa.md."""
