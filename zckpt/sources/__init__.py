"""Where tensors are read from.

A source lists its specs and reads element ranges of them. `engine` reads a live model,
`consolidated` a folder of safetensors files. Sources do not know each other.
"""
