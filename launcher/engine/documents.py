"""Packed documents: passes their boundaries to attention, and checks that the model keeps documents apart.

`position_ids` restart at each document. Without an attention mask, transformers derives block-diagonal masks
from them for its own attention (eager, sdpa, flex); FlashAttention needs the boundaries of the documents
instead. Not every model uses positions, and a recurrent state ignores them. So the check runs the model
itself.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers.utils.generic import is_flash_attention_requested

from launcher.data.documents import IGNORED
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

POSITIONS = "position_ids"
_ROUNDING = 1e-6  # relative rounding error of a loss in fp32
_NOISE = 10  # allowed multiple of the effect of later tokens, which causality hides: it is rounding only
_MOST = {2: 1e-3, 4: 1e-5}  # largest relative change of a loss by rounding, by bytes per element
_SEED = 20


def for_attention(engine: Engine, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch, with the document boundaries added if the model uses FlashAttention."""
    if POSITIONS not in batch or not is_flash_attention_requested(_text_config(engine)):
        return batch
    starts = (batch[POSITIONS].flatten() == 0).nonzero().flatten()
    borders = torch.cat([starts, starts.new_tensor([batch[POSITIONS].numel()])]).to(torch.int32)
    longest = int(borders.diff().max())
    of_both = {f"cu_seq_lens_{side}": borders for side in "qk"}
    return {**batch, **of_both, **{f"max_length_{side}": longest for side in "qk"}}


def check_kept_apart(engine: Engine, rows: int, length: int) -> None:
    """Check, in three evaluations, that a document does not change the loss of the next one. Every rank must
    call it.

    Args:
        rows, length: shape of a microbatch in training.

    Raises:
        ConfigError: the model does not accept positions, or attends across documents.
    """
    _check_signature(engine)
    third = length // 3
    if third < 2:
        return  # too short for three documents
    vocabulary = _text_config(engine).vocab_size
    generator = torch.Generator().manual_seed(_SEED)
    ids, other = (torch.randint(vocabulary, (rows, length), generator=generator) for _ in range(2))
    starts = torch.arange(length)
    starts = torch.where(starts < third, 0, torch.where(starts < 2 * third, third, 2 * third))
    learned = torch.zeros(length, dtype=torch.bool)
    learned[third + 1 : 2 * third] = True
    batch = {
        "labels": ids.masked_fill(~learned, IGNORED),
        POSITIONS: (torch.arange(length) - starts).expand(rows, -1).contiguous(),
    }

    def loss(changed: slice) -> float:
        seen = ids.clone()
        seen[:, changed] = other[:, changed]
        found = for_attention(engine, {"input_ids": seen, **batch})
        return engine.eval_microbatches([found] if engine.is_first_stage() else [], [1.0])

    training = engine.training
    engine.eval()
    alone, before, after = loss(slice(0, 0)), loss(slice(0, third)), loss(slice(2 * third, length))
    engine.train(training)
    leak, noise = abs(before - alone), abs(after - alone)
    most = _MOST[min(dtype.itemsize for dtype in (engine.zero.policy.param_dtype, engine._autocast) if dtype)]
    allowed = min(_NOISE * noise + _ROUNDING * abs(alone), most * abs(alone))
    leaks = torch.tensor(not leak <= allowed, dtype=torch.int32, device=engine.device)
    dist.all_reduce(leaks, op=dist.ReduceOp.MAX)
    if leaks:
        raise _refusal(
            engine, f"the loss of a document changes by {leak:.1e} with the tokens of the previous document"
        )


def _check_signature(engine: Engine) -> None:
    module: Any = engine.module
    of_peft = getattr(module, "get_base_model", None)  # PEFT's forward passes everything on
    known = inspect.signature(type(of_peft() if of_peft else module).forward).parameters
    if POSITIONS not in known:
        raise _refusal(engine, "it takes no position_ids")
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    if is_flash_attention_requested(_text_config(engine)) and not takes_more:
        raise _refusal(engine, "it does not pass the document boundaries to FlashAttention")


def _text_config(engine: Engine) -> Any:
    config: Any = engine.module.config
    return config.get_text_config()


def _refusal(engine: Engine, why: str) -> ConfigError:
    config = _text_config(engine)
    return ConfigError(
        f"{type(engine.module).__name__} does not separate packed documents: {why}",
        where=f"model_type {config.model_type!r}, attention {config._attn_implementation!r}",
        fix="pad the rows (finetune without --packed), or allow attention across documents (pretrain "
        'without --document-mask); another attention may work: "attn_implementation" in the '
        "model's config.json",
    )
