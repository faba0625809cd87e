"""Lets `python -m holdfast.cli` do what the `holdfast` command does, for running from source."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
