"""Guesses at a completion's next tokens, which the engine verifies: a wrong one costs time, never a draw."""

from keepmask.drafts.draft_length import Acceptance, StepCost, draft_lengths, worthwhile
from keepmask.drafts.history_store import HistoryStore
from keepmask.drafts.suffix_drafts import Drafter, DraftRow, SuffixDrafter

__all__ = [
    "Acceptance",
    "DraftRow",
    "Drafter",
    "HistoryStore",
    "StepCost",
    "SuffixDrafter",
    "draft_lengths",
    "worthwhile",
]
