"""The weights of a model that serves: its linear layers packed for this CPU, and replaced in place tensor by tensor.

oneDNN reorders a plain bf16 weight on every call; packed once, a step of 8 rows takes about three quarters of the
time, and the output layer half. Replacing reads one tensor at a time: an update needs no second model in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rollout.errors import ConfigError

Put = Callable[[torch.Tensor], object]


class PackedLinear(nn.Module):
    """A bf16 `nn.Linear` with its weight in oneDNN's blocked layout."""

    packed: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.fill(linear.weight.data)

    def fill(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.bfloat16), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class Weights:
    """Every parameter of `model` by its name on disk, wherever it lives after packing (a tied one lives twice)."""

    def __init__(self, model: nn.Module, *, pack: bool) -> None:
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._known = set(model.state_dict())
        self._places: defaultdict[str, list[Put]] = defaultdict(list)
        names = {id(p): name for name, p in model.named_parameters()}
        if pack:
            self._pack(model, names)
        for parameter in model.parameters():
            self._places[names[id(parameter)]].append(parameter.data.copy_)

    def _pack(self, model: nn.Module, names: dict[int, str]) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    packed = PackedLinear(child)
                    self._places[names[id(child.weight)]].append(packed.fill)
                    setattr(parent, name, packed)

    @torch.no_grad()
    def replace(self, folder: Path) -> None:
        """Copies the safetensors of `folder` in. Raises ConfigError, before the first byte, unless all of them fit.

        An error of the disk after that leaves a mixture: it is raised as it is and must end the engine.
        """
        files = sorted(folder.glob("*.safetensors"))
        found = {name: shape for file in files for name, shape in shapes_in(file).items()}
        odd = {n for n in self._shapes.keys() | found.keys() if found.get(n) != self._shapes.get(n)} - (
            self._known - self._shapes.keys()
        )
        if odd:
            raise ConfigError(
                f"the weights in {folder} have other names or shapes than the served ones: {', '.join(sorted(odd)[:5])}"
            )
        for file in files:
            for name in shapes_in(file).keys() & self._shapes.keys():
                with safe_open(file, framework="pt") as tensors:  # once a tensor: what was read stays mapped until then
                    tensor = tensors.get_tensor(name)
                    for put in self._places[name]:
                        put(tensor)
                    del tensor


def shapes_in(file: Path) -> dict[str, torch.Size]:
    """Raises ConfigError for a file that is not whole."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: torch.Size(tensors.get_slice(name).get_shape()) for name in list(tensors.keys())}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a complete safetensors file: {error}") from error
