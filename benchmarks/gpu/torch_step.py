"""GPT-2's training step in PyTorch: bf16 by autocast, f32 weights, fused AdamW, its own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.programs import ModelSize


def torch_step(size: ModelSize, device: str, *, compiled: bool) -> Callable[[], Any]:
    """A function that takes a step on random tokens and returns the loss.

    Raises:
        ImportError: PyTorch is not installed.
    """
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = _model(torch, size).to(device)
    fused = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=fused)
    forward = torch.compile(model) if compiled else model
    shape = (size.batch, size.tokens)
    tokens, labels = (torch.randint(size.vocabulary, shape, device=device) for _ in range(2))

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _model(torch: Any, size: ModelSize) -> Any:
    """The model as modules; its classes are made here, since PyTorch may be missing."""
    nn, functional, width = torch.nn, torch.nn.functional, size.width

    class TorchLayer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            parts = self.inner(self.norms[0](x)).chunk(3, -1)
            q, k, v = (p.unflatten(-1, (size.heads, -1)).transpose(1, 2) for p in parts)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.outer(mixed.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class TorchModel(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(size.vocabulary, width)
            self.places = nn.Parameter(0.02 * torch.randn(size.tokens, width))
            self.layers = nn.ModuleList(TorchLayer() for _ in range(size.layers))
            self.norm = nn.LayerNorm(width)

        def forward(self, tokens: Any, labels: Any) -> Any:
            x = self.table(tokens) + self.places
            for layer in self.layers:
                x = layer(x)
            logits = functional.linear(self.norm(x), self.table.weight)
            return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return TorchModel()
