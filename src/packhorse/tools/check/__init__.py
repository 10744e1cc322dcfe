"""Looking at data before they are trained on: a linter, statistics, and the reading of ledgers.

``check_meta`` finds what is wrong with the rows of a mixture, ``write_fixed`` makes a cleaned copy,
``stats_of`` tells how long and how heavy rows are, ``read_ledgers`` reads what runs have left behind.
"""

from packhorse.tools.check.check_report import CheckReport
from packhorse.tools.check.fix import Fixed, check_target, write_fixed
from packhorse.tools.check.rules import RULES, Finding, Rule
from packhorse.tools.check.run import check_meta

__all__ = [
    "RULES",
    "CheckReport",
    "Finding",
    "Fixed",
    "Rule",
    "check_meta",
    "check_target",
    "write_fixed",
]
