"""Where tensors are put: `model` fills a live model of any kind."""
