"""Pipeline parallelism: the layers of a model dealt out to the stages of the pp axis."""
