"""Logits by `transformers`, in a Python of its own: `python transformers_judge.py FOLDER`.

It reads every model in FOLDER/ours, makes those of `MODELS` in FOLDER/theirs, with random weights
in several files, and writes the logits of both for the tokens in FOLDER/tokens.npy, float32
[B, T, C], to FOLDER/logits.npz, named `ours/{name}` and `theirs/{name}`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

SIZES = dict(
    vocab_size=48, hidden_size=32, intermediate_size=56, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
LLAMA_3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
MODELS = {
    "plain": {},
    "one head for all": dict(num_key_value_heads=1, rms_norm_eps=1e-5, rope_theta=500.0),
    "head size": dict(head_dim=12, tie_word_embeddings=True),
    "linear": dict(rope_scaling=dict(rope_type="linear", factor=4.0)),
    "llama 3": dict(rope_scaling=LLAMA_3, rope_theta=500_000.0, tie_word_embeddings=True),
    "mistral": dict(sliding_window=None),
}


def random_model(name: str, seed: int):
    """A model whose weights, those of norms too, are random and none of them small."""
    torch.manual_seed(seed)
    llama, mistral = (LlamaConfig, LlamaForCausalLM), (MistralConfig, MistralForCausalLM)
    of_config, of_model = mistral if name == "mistral" else llama
    config = {**SIZES, **MODELS[name]}
    if "rope_scaling" in config and "rope_theta" in config:  # of one dict, since version 5
        config["rope_scaling"] = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    model = of_model(of_config(**config))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


def main(folder: Path) -> None:
    tokens = torch.from_numpy(np.load(folder / "tokens.npy")).long()
    models = {}
    for path in sorted((folder / "ours").iterdir()):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        models[f"ours/{path.name}"] = model
    for seed, name in enumerate(MODELS):
        model = random_model(name, seed)
        model.save_pretrained(folder / "theirs" / name, max_shard_size="20KB")
        models[f"theirs/{name}"] = model
    with torch.no_grad():
        logits = {name: model.eval()(tokens).logits.numpy() for name, model in models.items()}
    np.savez(folder / "logits.npz", **logits)
    turned = {name: model.model.rotary_emb.inv_freq.tolist() for name, model in models.items()}
    (folder / "frequencies.json").write_text(json.dumps(turned))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
