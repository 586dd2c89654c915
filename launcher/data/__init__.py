"""Text to tokens to the global batch of each step."""

from launcher.data.loader import GlobalBatchLoader
from launcher.data.pack import PackedDataset, pack
from launcher.data.sft import SftDataset, load_sft, prompt_tokens
from launcher.data.text import load_text
from launcher.data.tokenizer import byte_tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "GlobalBatchLoader",
    "PackedDataset",
    "SftDataset",
    "byte_tokenizer",
    "load_sft",
    "load_text",
    "load_tokenizer",
    "pack",
    "prompt_tokens",
    "train_tokenizer",
]
