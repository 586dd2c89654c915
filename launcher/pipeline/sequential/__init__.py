"""`PipelineModule`, a model as a sequence of layers (DeepSpeed's API), and its partition into stages."""
