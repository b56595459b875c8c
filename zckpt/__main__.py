"""`python -m zckpt`: the command line."""

from zckpt.cli import main

if __name__ == "__main__":
    main()
