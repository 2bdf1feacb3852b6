"""The embedded engine: a slot batcher over one causal language model, behind part of vLLM's HTTP API.

app (HTTP) -> worker (thread) -> batcher (one step at a time) -> slots (ids), model -> attention (keys, values)
"""
