"""Tiny models and a tokenizer on disk, as the hub would give them.

models.py DIRECTORY     (writes DIRECTORY/llama-tied, llama-untied, qwen2-tied, ...)
"""

import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<unk>", "<bos>", "<mask>"]
WORDS = [f"w{i}" for i in range(128 - len(SPECIAL))]
SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)
KINDS = {"llama": "Llama", "qwen2": "Qwen2", "opt": "OPT"}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, eos, unk, bos, mask = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        bos_token=bos,
        mask_token=mask,
        chat_template=TEMPLATE,
    )  # fmt: skip


def main(directory: Path) -> None:
    for name, kind in KINDS.items():
        for tied in (True, False):
            transformers.set_seed(1)
            config = getattr(transformers, f"{kind}Config")(**SIZES, tie_word_embeddings=tied)
            model = transformers.AutoModelForCausalLM.from_config(config)
            place = directory / f"{name}-{'tied' if tied else 'untied'}"
            model.save_pretrained(place)
            tokenizer().save_pretrained(place)
    bert(directory / "bert")


def bert(place: Path) -> None:
    sizes = {
        key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    config = transformers.BertConfig(
        **sizes,
        num_attention_heads=4,
        pad_token_id=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertModel(config).save_pretrained(place)
    tokenizer().save_pretrained(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
