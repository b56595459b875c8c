"""How a checkpoint gets onto the disk: `stream` writes ranges of files, `commit` makes it exist."""
