"""Looking at data before they are trained on: a linter, statistics, and the reading of ledgers.

``check_meta`` finds what is wrong with the rows of a mixture, ``write_fixed`` makes a cleaned copy,
``stats_of`` tells how long and how heavy rows are, ``read_ledgers`` reads what runs have left behind.
"""

from packhorse.check.fix import Fixed, check_target, write_fixed
from packhorse.check.ledgers import read_ledgers, selected
from packhorse.check.report import CheckReport
from packhorse.check.rules import RULES, Finding, Rule
from packhorse.check.run import check_meta
from packhorse.check.stats import DatasetStats, StatsReport, stats_of

__all__ = [
    "RULES",
    "CheckReport",
    "DatasetStats",
    "Finding",
    "Fixed",
    "Rule",
    "StatsReport",
    "check_meta",
    "check_target",
    "read_ledgers",
    "selected",
    "stats_of",
    "write_fixed",
]
