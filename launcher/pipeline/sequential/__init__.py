"""`PipelineModule`, a model as a row of layers (DeepSpeed's API), and its cut into stages."""
