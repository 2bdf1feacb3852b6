"""AdamW whose weights are float32 while the model computes in bfloat16. Serves SFT and the reference trainer.

bfloat16 has 8 bits of mantissa: an update of 1e-4 relative would vanish in the weights themselves. The optimizer
owns float32 copies, steps them with the model's gradients and writes them back rounded. The rounded model is the
one that an engine serves in bfloat16, so trainer and engine agree to a few thousandths of a nat a token.
"""

from __future__ import annotations

from typing import Any

import torch

from training.config import OptimizerConfig


class MasterAdamW(torch.optim.AdamW):
    """Takes over a float32 model: copies its weights, then casts the model to `compute`.

    With `compute` float32 the model's own parameters are the masters. `state_dict` holds the masters too.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig, compute: torch.dtype) -> None:
        if any(p.dtype != torch.float32 for p in model.parameters()):
            raise ValueError("the model must be loaded in float32: its weights become the master weights")
        self._split = compute != torch.float32
        self._working = [p for p in model.parameters() if p.requires_grad]
        masters = [p.detach().clone().requires_grad_() for p in self._working] if self._split else self._working
        model.to(compute)
        super().__init__(
            masters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @property
    def masters(self) -> list[torch.nn.Parameter]:
        found: list[torch.nn.Parameter] = self.param_groups[0]["params"]
        return found

    def collect(self) -> None:
        """Adds the model's gradients to the masters' in float32 and clears them; once a micro-batch, and by `step`."""
        if not self._split:
            return
        for master, working in zip(self.masters, self._working, strict=True):
            if working.grad is not None:
                fresh = working.grad.float()
                master.grad = fresh if master.grad is None else master.grad.add_(fresh)
                working.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients of the model's own parameters."""
        self.collect()
        super().step(closure)
        if self._split:
            self._write_back()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for working in self._working:
            working.grad = None

    @torch.no_grad()
    def _write_back(self) -> None:
        for master, working in zip(self.masters, self._working, strict=True):
            working.copy_(master)
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": [m.detach() for m in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores moments and masters, and rounds the masters into the model."""
        state = dict(state_dict)
        for master, saved in zip(self.masters, state.pop("masters"), strict=True):
            master.copy_(saved)
        super().load_state_dict(state)
        if self._split:
            self._write_back()

    def full_weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state in float32, masters in the place of rounded weights."""
        precise = {id(w): m.detach() for w, m in zip(self._working, self.masters, strict=True)}
        return {name: precise.get(id(p), p.detach()) for name, p in model.state_dict(keep_vars=True).items()}
