"""`python -m holdfast.cli` is the `holdfast` command, for running from source."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
