"""Fixtures of the tests of collate functions."""

import pytest

from packhorse.ledger import Ledger


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """An empty ledger in place of the process's own."""
    ledger = Ledger()
    monkeypatch.setattr("packhorse.collate.finish.default_ledger", lambda: ledger)
    return ledger
