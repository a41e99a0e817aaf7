"""Attention by PyTorch, in a Python of its own: `python torch_judge.py OPERANDS.npz RESULTS.npz`.

The mods are written once more, for torch. Values are FlexAttention's; gradients, which it does not
have on a CPU, are those of dense attention, all in float64. Operands are named `{mod}/{name}`, the
results `{mod}/out`, `{mod}/lse` and `{mod}/d{name}`, the gradients of `sum(sin(out)) +
sum(cos(lse))`. Layouts are torch's: heads before length. `tests/gpu/test_torch.py` compiles `MODS`.
"""

import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
    flex_attention,
)

MODS = {
    "plain": lambda c: (None, None),
    "causal": lambda c: (None, lambda b, h, q, k: q >= k),
    "window": lambda c: (None, lambda b, h, q, k: (q >= k) & (q - k < 7)),
    "prefix": lambda c: (None, lambda b, h, q, k: (q >= k) | (k < 5)),
    "documents": lambda c: (None, lambda b, h, q, k: (c["ids"][b, q] == c["ids"][b, k]) & (q >= k)),
    "dilated": lambda c: (None, lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k)),
    "alibi": lambda c: (lambda s, b, h, q, k: s - c["slopes"][h] * (q - k), None),
    "soft cap": lambda c: (lambda s, b, h, q, k: 2 * torch.tanh(s / 2), lambda b, h, q, k: q >= k),
    "relative": lambda c: (
        lambda s, b, h, q, k: s + c["table"][h, q - k + c["table"].shape[1] // 2], None,
    ),
    "rows and columns": lambda c: (
        lambda s, b, h, q, k: s * c["rows"][b, q] + c["columns"][h, k], None,
    ),
    "pair bias": lambda c: (
        lambda s, b, h, q, k: s + c["pairs"][h, q, k], lambda b, h, q, k: q >= k,
    ),
    "by head": lambda c: (
        lambda s, b, h, q, k: torch.where(h % 2 == 0, s, s * c["factor"][h]),
        lambda b, h, q, k: (q - k < 4 * (h + 1)) & (q >= k),
    ),
}  # fmt: skip
"""`captures -> (score_mod, mask_mod)`; the same names as in `tests/primitives/test_torch.py`."""


def joined(score_mod, mask_mod):
    """One score mod for both, so that no block map is needed."""

    def mod(s, b, h, q, k):
        s = s if score_mod is None else score_mod(s, b, h, q, k)
        return s if mask_mod is None else torch.where(mask_mod(b, h, q, k), s, -float("inf"))

    return mod


def dense(q, k, v, mod):
    """Output and log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = torch.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
    index = torch.meshgrid(*(torch.arange(n) for n in s.shape), indexing="ij")
    s = mod(s, *index)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def run(name, operands):
    """Results and gradients of one mod."""
    x = {n: torch.from_numpy(a) for n, a in operands.items()}
    x = {n: a.requires_grad_(a.is_floating_point()) for n, a in x.items()}
    fixed = {n: a.detach() for n, a in x.items()}
    out, lse = flex_attention(
        fixed["q"], fixed["k"], fixed["v"], score_mod=joined(*MODS[name](fixed)),
        enable_gqa=True, return_lse=True,
    )  # fmt: skip
    same, same_lse = dense(x["q"], x["k"], x["v"], joined(*MODS[name](x)))
    (torch.sin(same).sum() + torch.cos(same_lse).sum()).backward()
    grads = {f"d{n}": a.grad.numpy() for n, a in x.items() if a.grad is not None}
    return {"out": out.numpy(), "lse": lse.numpy(), **grads}


if __name__ == "__main__":
    source, target = sys.argv[1:]
    operands: dict = {}
    for key, array in np.load(source).items():
        name, operand = key.split("/")
        operands.setdefault(name, {})[operand] = array
    results = {name: run(name, x) for name, x in operands.items()}
    np.savez(target, **{f"{name}/{n}": a for name, x in results.items() for n, a in x.items()})
