"""`python -m exlm`: the command `exlm`, where it is not on the PATH."""

from .cli import main

if __name__ == "__main__":
    main()
