"""Expert parallelism: the experts of a mixture-of-experts model spread over ranks, tokens sent to them and back.

Router, shared experts and everything else stay the model's own. What is taken over is the call of the experts
(`use_experts_implementation` of transformers): they are given the tokens that all ranks of the axis `ep` have for them,
and compute those with the model's own code.

`apply.py` splits the experts and puts the exchange around their call; `dispatch.py` is the exchange.
"""
