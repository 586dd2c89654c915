"""Pipeline parallelism: a model cut into stages along the pp axis, run by lists of actions."""
