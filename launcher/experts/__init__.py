"""Expert parallelism: shards the experts of a mixture-of-experts model, and sends tokens to them and back.

The router, shared experts and all other modules are unchanged. Only the call of the experts is intercepted
(`use_experts_implementation` of transformers): they receive their tokens from all ranks of the axis `ep`, and
compute them with the model's own code.

`apply.py` shards the experts and wraps their call in the exchange, which `dispatch.py` implements.
"""
