"""``python -m packhorse.cli.demo``: what ``make demo`` runs."""

from packhorse.cli.demo.steps import main

if __name__ == "__main__":
    main()
