"""``python -m pullback`` is the command line."""

from pullback.cli import main

if __name__ == "__main__":
    main()
