"""``python -m packhorse``: the command line."""

from packhorse.cli.app import main

if __name__ == "__main__":
    main()
