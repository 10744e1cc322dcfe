"""``packhorse demo``: from rows to a trained model in one run, with a report.

``steps`` tells the story, ``train`` is the run that is killed and goes on, ``tiny`` the model, ``report`` the
page at the end.
"""

from packhorse.cli.demo.steps import main, run_demo

__all__ = ["main", "run_demo"]
