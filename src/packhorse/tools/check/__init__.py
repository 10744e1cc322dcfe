"""A linter for data: ``check_meta`` finds what is wrong with rows, ``write_fixed`` makes a cleaned copy."""

from packhorse.tools.check.fix import Fixed, check_target, write_fixed
from packhorse.tools.check.rules import RULES, Finding, Rule
from packhorse.tools.check.run import CheckReport, check_meta

__all__ = ["RULES", "CheckReport", "Finding", "Fixed", "Rule", "check_meta", "check_target", "write_fixed"]
