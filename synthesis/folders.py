"""Where bundles stand: drafts apart from accepted tasks, so that `tasks/<batch>` holds accepted tasks alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from rollout.config import Home
from synthesis.types import Proposal


def draft_folder(home: Home, proposal: Proposal) -> Path:
    return home.root / "drafts" / proposal.batch / proposal.id


def task_folder(home: Home, proposal: Proposal) -> Path:
    return home.tasks / proposal.batch / proposal.id


def bundle_folder(home: Home, proposal: Proposal) -> Path:
    """The accepted bundle if it is published, else the draft."""
    published = task_folder(home, proposal)
    return published if published.exists() else draft_folder(home, proposal)


def publish(home: Home, proposal: Proposal) -> None:
    """Moves a draft among the accepted tasks, at once or not at all; done already is fine."""
    draft, target = draft_folder(home, proposal), task_folder(home, proposal)
    if draft.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
