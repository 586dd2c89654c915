"""A Hugging Face model cut into stages: its own forward runs on every stage, with stand-ins for what others run."""
