"""A small Hugging Face checkpoint, as `transformers` writes one."""

from __future__ import annotations

from pathlib import Path


def make_checkpoint(folder: Path, hidden_size: int = 72, heads: int = 9, kv_heads: int = 3) -> Path:
    """Write a tiny model, with SmolLM2's numbers of heads, and a tokenizer of bytes; return the folder."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        bos_token_id=256,
        eos_token_id=257,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes to a folder."""
    import tokenizers

    folder.mkdir(exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
