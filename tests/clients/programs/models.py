"""Tiny models and a tokenizer on disk, as the hub would give them.

models.py DIRECTORY     (writes DIRECTORY/llama-tied, llama-untied, qwen2-tied, ..., and pictures and hub there)
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

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
REVISION = "0" * 40


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
    transformers.set_seed(1)
    transformers.BertModel(bert()).save_pretrained(directory / "bert")
    tokenizer().save_pretrained(directory / "bert")
    pictures(directory / "pictures")
    hub(directory / "hub")


def pictures(directory: Path) -> None:
    """Four of each of five kinds, named as those of the Oxford pets are."""
    source = numpy.random.default_rng(0)
    directory.mkdir()
    for number in range(20):
        pixels = source.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(directory / f"kind{number % 5}_{number}.jpg")


def bert() -> transformers.BertConfig:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return transformers.BertConfig(
        **{key: SIZES[key] for key in keys},
        pad_token_id=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


# ---- a cache of the hub ---------------------------------------------------------------------------


def _gpt2() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 1024, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def _gptj() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, bos_token_id=1, eos_token_id=1))


def _t5() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def _distilbert() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 128, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
    return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes))


def _qwen2_moe() -> transformers.PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shared = {"shared_expert_intermediate_size": 16}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES, **experts, **shared))


def _causal(kind: str) -> Callable[[], transformers.PreTrainedModel]:
    def make() -> transformers.PreTrainedModel:
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, f"{kind}Config")(**SIZES, tie_word_embeddings=False)
        )

    return make


HUB: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt2": _gpt2,
    "sshleifer/tiny-gpt2": _gpt2,
    "hf-internal-testing/tiny-random-gpt2": _gpt2,
    "hf-internal-testing/tiny-random-gptj": _gptj,
    "hf-internal-testing/tiny-random-LlamaForCausalLM": _causal("Llama"),
    "HuggingFaceTB/SmolLM-360M": _causal("Llama"),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": _causal("Qwen2"),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": _qwen2_moe,
    "patrickvonplaten/t5-tiny-random": _t5,
    "bert-base-cased": lambda: transformers.BertForPreTraining(bert()),
    "distilbert-base-uncased": _distilbert,
}
"""Name on the hub -> a model of that kind."""


def hub(directory: Path) -> None:
    """What a cache of the hub holds after these models were downloaded: enough for a machine without a network."""
    for name, make in HUB.items():
        transformers.set_seed(1)
        place = cached(directory, name)
        make().save_pretrained(place)
        words: PreTrainedTokenizerBase = transformers.T5Tokenizer() if "t5" in name else tokenizer()
        words.save_pretrained(place)
    transformers.MobileViTConfig().save_pretrained(cached(directory, "apple/mobilevit-xx-small"))


def cached(directory: Path, name: str) -> Path:
    """Where the files of a repository are."""
    place = directory / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(REVISION)
    return place / "snapshots" / REVISION


if __name__ == "__main__":
    main(Path(sys.argv[1]))
