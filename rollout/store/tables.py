"""Tables of `rollouts.db` (queue, engines, stage records) and `calls.db` (written by the proxy alone).

Columns are what is queried; the whole record stands beside them as JSON in `body`. The long fields of a call are
parts (parts.py), and its columns `PARTS` name them.
"""

from __future__ import annotations

import sqlalchemy as sa

ROLLOUTS = sa.MetaData()
CALLS = sa.MetaData()
PARTS = ("prompt", "answer", "messages", "tools", "request", "response")

rollouts = sa.Table(
    "rollouts",
    ROLLOUTS,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("run", sa.String, nullable=False, index=True),
    sa.Column("task_id", sa.String, nullable=False),
    sa.Column("group_id", sa.String, nullable=False, index=True),
    sa.Column("start_index", sa.Integer, nullable=False),
    sa.Column("retry_of", sa.String, index=True),
    sa.Column("purpose", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False, index=True),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("owner", sa.String),
    sa.Column("lease_until", sa.Float),
    sa.Column("cancel", sa.Boolean, nullable=False, default=False),
    sa.Column("end_reason", sa.String, nullable=False, default="", server_default=""),
    sa.Column("weight_version", sa.Integer),
    sa.Column("calls", sa.Integer, nullable=False, default=0, server_default="0"),
    sa.Column("tokens", sa.Integer, nullable=False, default=0, server_default="0"),
    sa.Column("body", sa.Text, nullable=False),
)

keys = sa.Table(
    "keys",
    ROLLOUTS,
    sa.Column("hash", sa.String, primary_key=True),
    sa.Column("rollout_id", sa.String, nullable=False, index=True),
    sa.Column("phase", sa.String, nullable=False),
    sa.Column("revoked", sa.Boolean, nullable=False, default=False),
)

engines = sa.Table(
    "engines",
    ROLLOUTS,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("model", sa.String, nullable=False, index=True),
    sa.Column("exclusive", sa.String, nullable=False),
    sa.Column("lease_until", sa.Float, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)

records = sa.Table(
    "records",
    ROLLOUTS,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("run", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)

calls = sa.Table(
    "calls",
    CALLS,
    sa.Column("rollout_id", sa.String, primary_key=True),
    sa.Column("index", sa.Integer, primary_key=True),
    sa.Column("delivered", sa.Boolean, nullable=False, default=False),
    sa.Column("failed", sa.Boolean, nullable=False, default=False),
    sa.Column("tokens", sa.Integer, nullable=False, default=0),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("logprobs", sa.LargeBinary),
    *(sa.Column(name, sa.LargeBinary) for name in PARTS),
)

parts = sa.Table(
    "parts",
    CALLS,
    sa.Column("id", sa.LargeBinary, primary_key=True),
    sa.Column("base", sa.LargeBinary),
    sa.Column("head", sa.Integer, nullable=False),
    sa.Column("tail", sa.Integer, nullable=False),
    sa.Column("ids", sa.Boolean, nullable=False),
    sa.Column("holes", sa.Text, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
